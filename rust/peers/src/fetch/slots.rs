//! Reserved slots for what is to come: had within a bounded time, and given up in the one way that is safe.

use std::ops::Range;
use std::time::Instant;

use pegaflow_engine::{BlockRef, Key, Result};

use super::Fetch;
use crate::limits::{SLOT_PAUSE, SLOT_WAIT_MAX};

/// Slots for some of a range of keys.
#[derive(Default)]
pub(crate) struct Slots {
    /// Positions and their reserved slots, in order.
    pub(crate) reserved: Vec<(usize, BlockRef)>,
    /// Positions whose blocks are in memory already.
    pub(crate) local: Vec<usize>,
    /// Positions for which there was no slot.
    pub(crate) refused: usize,
}

/// Reserve a slot for each key of `range` whose block is not in memory. Waits a bounded time while the pool grows.
pub(crate) fn reserve(fetch: &Fetch, range: Range<usize>) -> Result<Slots> {
    let (pool, ns) = (&fetch.inner.pool, fetch.asked.namespace);
    let until = Instant::now() + SLOT_WAIT_MAX;
    let mut slots = Slots::default();
    let mut wanted: Vec<usize> = range.collect();
    loop {
        let keys: Vec<Key> = wanted.iter().map(|position| fetch.asked.keys[*position]).collect();
        let present = pool.contains(ns, &keys)?;
        slots.local.extend(wanted.iter().zip(&present).filter(|(_, present)| **present).map(|(position, _)| *position));
        wanted = wanted.iter().zip(&present).filter(|(_, present)| !**present).map(|(position, _)| *position).collect();
        let keys: Vec<Key> = wanted.iter().map(|position| fetch.asked.keys[*position]).collect();
        let parents: Vec<Option<Key>> = wanted.iter().map(|position| fetch.parent_of(*position)).collect();
        let got = pool.reserve(ns, &keys, Some(&parents), true)?;
        // In order, with holes where a sibling was faster.
        let taken = got.last().map_or(0, |(index, _)| index + 1);
        let named = got.iter().map(|(index, block)| (wanted[*index], *block));
        slots.reserved.extend(named);
        let is_reserved = |index: &usize| got.binary_search_by_key(index, |(index, _)| *index).is_ok();
        slots.local.extend((0..taken).filter(|index| !is_reserved(index)).map(|index| wanted[index]));
        wanted.drain(..taken);
        if wanted.is_empty() {
            break;
        }
        if Instant::now() >= until || fetch.is_closed() {
            slots.refused = wanted.len();
            break;
        }
        std::thread::sleep(SLOT_PAUSE);
    }
    slots.reserved.sort_unstable_by_key(|(position, _)| *position);
    Ok(slots)
}

/// Give slots up: free at once if nothing writes them any more, else after a quarantine.
pub(crate) fn give_up(fetch: &Fetch, blocks: &[BlockRef], quiet: bool) {
    let given_up = if quiet { fetch.inner.pool.abort(blocks) } else { fetch.inner.pool.quarantine(blocks) };
    if let Err(error) = given_up {
        // Who was taken for dead has lost them already.
        log::debug!("pegaflow: slots of a fetch are not given up: {error}");
    }
}
