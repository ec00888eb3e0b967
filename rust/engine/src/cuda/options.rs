//! How the transfer engine works, and the bounds of each number.

use crate::error::{Error, Result};

use super::driver::Way;

/// How bytes get between slots and blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Directly where runs are long, staged otherwise.
    Auto,
    /// Contiguous copies between slots and a ring in device memory; a kernel between the ring and the blocks.
    Staged,
    /// One copy per contiguous run of bytes.
    Direct,
    /// A kernel that reads and writes the slots by itself.
    Kernel,
}

impl Backend {
    /// The backend of this name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "staged" => Ok(Self::Staged),
            "direct" => Ok(Self::Direct),
            "kernel" => Ok(Self::Kernel),
            _ => Err(Error::invalid(format!(
                "there is no transfer backend '{name}': choose auto, staged, direct or kernel"
            ))),
        }
    }
}

/// Bytes page-locked by one call at most.
pub(super) const REGISTER_CHUNK_BYTES_MAX: usize = 1 << 30;

/// Choices of a [`super::CudaCopier`].
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// How bytes move.
    pub backend: Backend,
    /// CTAs of a kernel at most: how much of the device one launch may take.
    pub ctas: u32,
    /// Buffers of each direction's ring in device memory.
    pub ring_buffers: usize,
    /// Bytes of one of them. The rings take `2 * ring_buffers * ring_buffer_bytes` of device memory.
    pub ring_buffer_bytes: usize,
    /// Streams over which the copies of one direction are spread.
    pub copy_streams: usize,
    /// Whether several copies go to the driver in one call, if it can (CUDA 13).
    pub batch_copies: bool,
    /// With `Auto`: from this average length of runs on, blocks are copied directly. 0: 1 MiB for loads
    /// and 64 KiB for saves where the driver takes many copies in one call, else 4 MiB. Direct copies take no SMs, but
    /// more calls of the driver.
    pub direct_bytes_min: usize,
    /// The same for saves alone; 0: as above.
    pub direct_save_bytes_min: usize,
    /// Bytes per second that saves move at most; 0: as fast as they can.
    pub save_bytes_per_second_max: u64,
    /// Whether segments are page-locked in the background. If not, everything goes through page-locked buffers.
    pub register: bool,
    /// Bytes page-locked by one call.
    pub register_chunk_bytes: usize,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            backend: Backend::Auto,
            ctas: 32,
            ring_buffers: 3,
            ring_buffer_bytes: 16 << 20,
            copy_streams: 1,
            batch_copies: true,
            direct_bytes_min: 0,
            direct_save_bytes_min: 0,
            save_bytes_per_second_max: 0,
            register: true,
            register_chunk_bytes: 16 << 20,
        }
    }
}

/// Nobody waits for a save, but everybody for the SMs that a kernel takes; and a kernel waits until a matrix product
/// leaves it some. Below, the copy engine alone is slower than the bus.
const DIRECT_SAVE_BYTES_MIN_BATCHED: usize = 64 << 10;
const DIRECT_LOAD_BYTES_MIN_BATCHED: usize = 1 << 20;
const DIRECT_BYTES_MIN_SINGLE: usize = 4 << 20;

/// Ring buffers are cut at multiples of this, so that vector accesses stay aligned.
pub(super) const PACKED_ALIGNMENT: usize = 64;

impl CudaOptions {
    /// Refuse numbers out of bounds.
    pub(super) fn check(&self) -> Result<()> {
        let bounded = |name: &str, value: usize, least: usize, most: usize| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(Error::invalid(format!("{name} is {value}: choose {least} to {most}"))),
        };
        bounded("ctas", self.ctas as usize, 1, 1024)?;
        bounded("ring_buffers", self.ring_buffers, 2, 16)?;
        bounded("ring_buffer_bytes", self.ring_buffer_bytes, 4096, 1 << 30)?;
        bounded("copy_streams", self.copy_streams, 1, 8)?;
        bounded("register_chunk_bytes", self.register_chunk_bytes, 1 << 20, REGISTER_CHUNK_BYTES_MAX)?;
        for (name, bytes) in
            [("ring_buffer_bytes", self.ring_buffer_bytes), ("register_chunk_bytes", self.register_chunk_bytes)]
        {
            if !bytes.is_multiple_of(4096) {
                return Err(Error::invalid(format!("{name} is {bytes}: choose whole pages of 4096 bytes")));
            }
        }
        Ok(())
    }

    /// With `Auto`: the length of runs from which on they are copied directly.
    pub(super) fn direct_from(&self, way: Way, driver_batches: bool) -> usize {
        match self.direct_bytes_min {
            _ if way == Way::ToHost && self.direct_save_bytes_min > 0 => self.direct_save_bytes_min,
            0 if driver_batches && way == Way::ToHost => DIRECT_SAVE_BYTES_MIN_BATCHED,
            0 if driver_batches => DIRECT_LOAD_BYTES_MIN_BATCHED,
            0 => DIRECT_BYTES_MIN_SINGLE,
            chosen => chosen,
        }
    }

    /// Device memory that the rings of both directions take.
    pub fn ring_bytes(&self) -> usize {
        2 * self.ring_buffers * self.ring_buffer_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_within_bounds() {
        CudaOptions::default().check().unwrap();
        assert_eq!(CudaOptions::default().ring_bytes(), 96 << 20);
    }

    #[test]
    fn numbers_out_of_bounds_are_refused_by_name() {
        let defaults = CudaOptions::default;
        for (name, options) in [
            ("ctas", CudaOptions { ctas: 0, ..defaults() }),
            ("ring_buffers", CudaOptions { ring_buffers: 1, ..defaults() }),
            ("ring_buffer_bytes", CudaOptions { ring_buffer_bytes: 4097, ..defaults() }),
            ("copy_streams", CudaOptions { copy_streams: 9, ..defaults() }),
            ("register_chunk_bytes", CudaOptions { register_chunk_bytes: 1 << 39, ..defaults() }),
        ] {
            let error = options.check().unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
    }

    #[test]
    fn runs_are_copied_directly_earlier_if_many_go_in_one_call() {
        let automatic = CudaOptions::default();
        assert!(automatic.direct_from(Way::ToDevice, true) < automatic.direct_from(Way::ToDevice, false));
        assert!(automatic.direct_from(Way::ToHost, true) < automatic.direct_from(Way::ToDevice, true));
        let chosen = CudaOptions { direct_bytes_min: 5, ..automatic };
        assert_eq!(chosen.direct_from(Way::ToHost, false), 5);
        let apart = CudaOptions { direct_save_bytes_min: 7, ..chosen };
        assert_eq!([Way::ToHost, Way::ToDevice].map(|way| apart.direct_from(way, true)), [7, 5]);
    }

    #[test]
    fn unknown_backends_are_refused() {
        assert_eq!(Backend::parse("staged").unwrap(), Backend::Staged);
        assert!(Backend::parse("fast").is_err());
    }
}
