//! Storing a value: reserve its slots, write them, publish the head in place of an older value.

use crate::error::{Error, ErrorKind, Result};
use crate::key::{BlockRef, Key};
use crate::limits::{OBJECT_KEY_BYTES_MAX, OBJECT_PARALLEL_BYTES_MIN, OBJECT_VALUE_BYTES_MAX};
use crate::shm::core::Core;
use crate::shm::publish::Published;
use crate::shm::reserve::Pending;
use crate::sync::Release;

use super::bytes;
use super::classes::HEAD;
use super::find::{Found, hash_of};
use super::patience::Patience;
use super::record::{Record, ValueKind};
use super::store::Inner;

/// A block that this process fills; given back when dropped, unless it was published.
pub(super) struct Reservation<'a> {
    pub(super) core: &'a Core,
    pub(super) head: BlockRef,
    pub(super) published: bool,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.published && self.core.is_member() {
            self.core.give_back(self.head.slot(), self.core.reserved_state(self.head));
        }
    }
}

impl Inner {
    pub(super) fn put(&self, key: &str, kind: ValueKind, value: &[u8]) -> Result<()> {
        let core = self.core();
        core.check_usable()?;
        check_sizes(key, value)?;
        let hash = hash_of(key);
        if let Found::Other = self.find(&hash, key)? {
            return Err(Error::invalid(format!(
                "the key {key:?} has the same 128-bit hash as another key of the pool: choose another key"
            )));
        }
        let record = Record { kind, key_bytes: key.len(), value_bytes: value.len() };
        let reservation = self.reserve(&hash, record.total_bytes())?;
        let head = reservation.head;
        let threads = if value.len() >= OBJECT_PARALLEL_BYTES_MIN { self.threads() } else { None };
        let sources = [&record.encode(), key.as_bytes(), value];
        let checksum = bytes::write(core, head, sources, threads.as_deref(), self.checksum)?;
        // Both lengths are limited, so their sum fits.
        core.control.slot_unchecked(head.slot()).used_bytes.store(record.total_bytes() as u32, Release);
        core.mark_part_written(head, 0, checksum)?;
        self.publish(&hash, reservation)?;
        self.stats.puts.add(1);
        Ok(())
    }

    fn publish(&self, hash: &Key, mut reservation: Reservation<'_>) -> Result<()> {
        let core = self.core();
        let ns = self.classes.namespace(HEAD);
        let pending = Pending { ns, key: *hash, parent: None, account: core.me.row, used: true };
        let mut patience = Patience::default();
        // Anything but success means that the bucket's lock could not be had in time.
        while core.publish_one(reservation.head, &pending, true) != Published::Visible {
            patience.wait()?;
        }
        reservation.published = true;
        Ok(())
    }
}

fn check_sizes(key: &str, value: &[u8]) -> Result<()> {
    if key.len() > OBJECT_KEY_BYTES_MAX {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("a key of {} bytes is too long: use at most {OBJECT_KEY_BYTES_MAX} bytes of UTF-8", key.len()),
        ));
    }
    if value.len() as u64 > OBJECT_VALUE_BYTES_MAX {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("a value of {} bytes is too large: split it, values have at most 1 GiB", value.len()),
        ));
    }
    Ok(())
}
