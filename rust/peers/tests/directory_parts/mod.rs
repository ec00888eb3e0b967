//! A real server, and pools that exist only as lists of blocks.
#![allow(unreachable_pub, reason = "shared by tests")]

mod blocks;
mod server;

pub use blocks::Blocks;
pub use server::{Server, ask};
