//! Models: a few processes on one small pool, every interleaving of their steps, under loom. The code is the engine's
//! own; only words, pauses and the kernel's lock table are replaced. Each file states what must hold.

#[cfg(test)]
mod chains;
#[cfg(test)]
mod deaths;
#[cfg(test)]
mod extents;
#[cfg(test)]
mod index;
#[cfg(test)]
mod leases;
pub(crate) mod locks;
#[cfg(test)]
mod locks_of_the_dead;
pub(crate) mod memory;
#[cfg(test)]
mod world;

use crate::key::Key;
use crate::shm::core::Core;
use crate::shm::namespace::Identity;

impl Core {
    /// No names are kept in models.
    pub(crate) fn went_lately(&self, _identity: &Identity, _key: &Key) -> bool {
        false
    }
}
