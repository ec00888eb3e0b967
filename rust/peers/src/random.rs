//! Names and secrets that nobody guesses.

use std::fs::File;
use std::io::Read;

use pegaflow_engine::{Error, ErrorKind, Result};

/// Bytes from the kernel's generator.
pub(crate) fn bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).map_err(|error| {
        Error::new(ErrorKind::Device, format!("/dev/urandom cannot be read ({error}): mount /dev in this container"))
    })?;
    Ok(bytes)
}

/// A number that is not 0.
pub(crate) fn number() -> Result<u64> {
    Ok(u64::from_le_bytes(bytes()?).max(1))
}
