//! Where a pool's segments lie: beside the control file, or in a directory of huge pages (`segments_dir.rs`).

use std::fs::File;

use nix::fcntl::Flock;

use crate::error::{Error, ErrorKind, Result};
use crate::shm::file::Place;
use crate::shm::geometry::PAGE;

/// Where segments lie.
pub(crate) struct Home {
    pub(crate) place: Place,
    /// Segments are as long as some of these.
    pub(crate) page_bytes: u64,
    /// Says that somebody uses it; `None` beside the control file.
    pub(crate) lock: Option<Flock<File>>,
}

impl Home {
    /// Beside the control file in `place`.
    pub(crate) fn beside(place: &Place) -> Self {
        Self { place: place.clone(), page_bytes: PAGE, lock: None }
    }

    /// Claim memory for a whole segment, so that what is missing is an error here and never a SIGBUS later.
    pub(crate) fn claim(&self, file: &File, bytes: u64) -> Result<()> {
        let claimed = self.place.claim(file, 0, bytes, "cached blocks");
        if self.lock.is_some() && claimed.is_err() { Err(no_huge_pages(bytes)) } else { claimed }
    }

    /// What a segment that cannot be mapped means here.
    pub(crate) fn explain(&self, bytes: u64, error: Error) -> Error {
        // The kernel promises all huge pages of a file when it is mapped.
        if self.lock.is_some() { no_huge_pages(bytes) } else { error }
    }
}

fn no_huge_pages(bytes: u64) -> Error {
    Error::new(
        ErrorKind::ShmFull,
        format!(
            "no free huge pages for {} MiB of cached blocks: reserve more (sysctl vm.nr_hugepages) or choose a smaller \
             pool_size",
            bytes >> 20
        ),
    )
}
