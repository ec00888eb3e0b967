//! What a pool that is too small, or a host with too little memory or too few CPUs, does to those who use it.

use std::sync::PoisonError;

use serde::Serialize;

use super::counters::Counter;
use super::file::Traffic;
use crate::shm::core::Core;
use crate::shm::namespace::Namespace;
use crate::shm::process::Member;
use crate::sync::Relaxed;

/// What this process has added to the counters of the pool.
#[derive(Default)]
pub(super) struct Told {
    lock_timeouts: u64,
    index_rebuilds: u64,
}

/// Counters of the pool as a whole, and the longest wait of those who are alive.
#[derive(Serialize)]
pub(super) struct PressureReport {
    pub(super) lock_timeouts: u64,
    pub(super) index_rebuilds: u64,
    pub(super) lock_wait_us_max: u64,
}

impl Core {
    /// Count for a namespace.
    pub(crate) fn note(&self, ns: Option<Namespace>, counter: Counter, count: u64) {
        if let Some(counters) = ns.and_then(|ns| self.counters_of(ns)) {
            counters.add(counter, count);
        }
    }

    /// Bring to the pool's counters what this process has counted since it did so last; nothing before it has opened a
    /// namespace. For what happens seldom.
    pub(crate) fn tell_pressure(&self) {
        let Some(traffic) = self.traffic() else { return };
        let mut told = self.traffic.told.lock().unwrap_or_else(PoisonError::into_inner);
        let header = traffic.header();
        let now =
            Told { lock_timeouts: self.stats.lock_timeouts.get(), index_rebuilds: self.stats.index_rebuilds.get() };
        header.lock_timeouts.fetch_add(now.lock_timeouts - told.lock_timeouts, Relaxed);
        header.index_rebuilds.fetch_add(now.index_rebuilds - told.index_rebuilds, Relaxed);
        *told = now;
        let wait_us = self.stats.lock_wait_us_max.get().min(u64::from(u32::MAX));
        header.lock_waits[self.me.row as usize].store(mark_of(self.me) | wait_us, Relaxed);
    }
}

impl Traffic {
    /// `alive`: processes whose waits count.
    pub(super) fn pressure(&self, alive: &[Member]) -> PressureReport {
        let header = self.header();
        let wait_us = |member: &Member| {
            let word = header.lock_waits.get(member.row as usize)?.load(Relaxed);
            // What another process left in this row is not its wait.
            (word & !u64::from(u32::MAX) == mark_of(*member)).then_some(word & u64::from(u32::MAX))
        };
        PressureReport {
            lock_timeouts: header.lock_timeouts.load(Relaxed),
            index_rebuilds: header.index_rebuilds.load(Relaxed),
            lock_wait_us_max: alive.iter().filter_map(wait_us).max().unwrap_or(0),
        }
    }
}

fn mark_of(member: Member) -> u64 {
    member.epoch << 32
}
