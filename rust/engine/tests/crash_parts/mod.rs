//! The parts of the test that kills at every point and in every pair of points.

pub mod home;
pub mod lane;
pub mod nursery;
pub mod survivor;
pub mod tally;
