//! Moving bytes between blocks in the memory of a CUDA device and slots of a pool.
//!
//! CUDA is found at run time and only when a copier is made. `plan` decides which bytes go where and knows no driver;
//! `route` queues one piece on the device, `lane` keeps one direction full, `engine` is the thread that drives both;
//! `registration` knows which memory is page-locked, and `registrar` is the thread that page-locks more. Everything
//! talks to `driver`, behind which is a device or a fake.

mod activity;
mod board;
mod copier;
mod device;
mod driver;
mod engine;
mod events;
mod followed;
mod kernel_params;
mod lane;
mod library;
mod locked_segment;
mod moving;
mod options;
mod plan;
mod registrar;
mod registration;
mod registration_progress;
mod ring;
mod route;
mod tables;
mod tally;
mod touch;

#[cfg(test)]
mod copier_tests;
#[cfg(test)]
mod failure_tests;
#[cfg(test)]
mod fake_driver;
#[cfg(test)]
mod fake_space;
#[cfg(test)]
mod followed_tests;
#[cfg(test)]
mod pool_tests;
#[cfg(test)]
mod registration_tests;

pub use copier::CudaCopier;
pub use options::{Backend, CudaOptions};
pub use registration_progress::RegistrationProgress;
