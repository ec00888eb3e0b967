//! Moving bytes between blocks in the memory of a CUDA device and slots of a pool.
//!
//! CUDA is found at run time and only when a copier is made. `plan` decides which bytes go where and knows no driver;
//! `route` queues one piece on the device, `lane` keeps one direction full, `engine` is the thread that drives both;
//! `registration` page-locks segments meanwhile. Everything talks to `driver`, behind which is a device or a fake.

mod board;
mod copier;
mod device;
mod driver;
mod engine;
mod events;
mod kernel_params;
mod lane;
mod library;
mod locked_segment;
mod options;
mod plan;
mod registration;
mod ring;
mod route;
mod tables;
mod tally;

#[cfg(test)]
mod copier_tests;
#[cfg(test)]
mod failure_tests;
#[cfg(test)]
mod fake_driver;
#[cfg(test)]
mod fake_space;
#[cfg(test)]
mod pool_tests;

pub use copier::CudaCopier;
pub use options::{Backend, CudaOptions};
pub use registration::RegistrationProgress;
