//! What the leader tells others of the store: its counters, how fast it reads, and since when it does not answer.

use std::time::{Duration, Instant};

use super::counters::Counter;
use super::rows::TierHeader;
use super::slots::SlotTarget;
use crate::shm::clock::boot_ms;
use crate::ssd::{Counters, Store};
use crate::sync::Relaxed;

/// Bandwidth is measured over so much time in which reads were on their way.
const SAMPLE: Duration = Duration::from_millis(20);
/// Percent that a new sample counts for.
const SAMPLE_PERCENT: u64 = 30;

pub(crate) struct Gauges {
    counted: Counters,
    /// Counters when the present sample began.
    sampled: Counters,
    sampled_time: Duration,
    last: Instant,
    reading: bool,
    ended_reads: u64,
}

impl Gauges {
    pub(crate) fn new() -> Self {
        let (counted, sampled) = (Counters::default(), Counters::default());
        let (sampled_time, last) = (Duration::ZERO, Instant::now());
        Self { counted, sampled, sampled_time, last, reading: false, ended_reads: 0 }
    }

    /// Publish how things are, with so many reads on their way.
    pub(crate) fn round(&mut self, header: &TierHeader, store: &Store<SlotTarget>, queued_bytes: u64, reads: usize) {
        let now = store.counters();
        self.count(header, &now);
        header.queued_bytes.store(queued_bytes, Relaxed);
        header.records.store(store.view().records() as u64, Relaxed);
        self.sample(header, &now);
        let ended = now.records_read + now.reads_evicted + now.reads_damaged + now.reads_failed;
        if reads == 0 {
            header.waiting_since_ms.store(0, Relaxed);
        } else if !self.reading || ended != self.ended_reads {
            header.waiting_since_ms.store(boot_ms().max(1), Relaxed);
        }
        (self.reading, self.ended_reads) = (reads > 0, ended);
    }

    fn count(&mut self, header: &TierHeader, now: &Counters) {
        let before = std::mem::replace(&mut self.counted, *now);
        for (counter, before, now) in [
            (Counter::ReadBytes, before.bytes_read, now.bytes_read),
            (Counter::ReadBlocks, before.records_read, now.records_read),
            (Counter::ReadEvicted, before.reads_evicted, now.reads_evicted),
            (Counter::ReadDamaged, before.reads_damaged, now.reads_damaged),
            (Counter::ReadFailed, before.reads_failed, now.reads_failed),
            (Counter::RecordsEvicted, before.records_evicted, now.records_evicted),
            (Counter::SpillRefused, before.records_refused, now.records_refused),
            (Counter::SpilledBytes, before.bytes_written, now.bytes_written),
            (Counter::TurnedOff, before.turned_off, now.turned_off),
        ] {
            header.add(counter, now - before);
        }
    }

    /// Bandwidth of reads over the time in which some were on their way.
    fn sample(&mut self, header: &TierHeader, now: &Counters) {
        let elapsed = self.last.elapsed();
        self.last = Instant::now();
        if self.reading {
            self.sampled_time += elapsed;
        }
        let bytes = now.bytes_read - self.sampled.bytes_read;
        if self.sampled_time < SAMPLE || bytes == 0 {
            return;
        }
        let measured = (bytes as f64 / self.sampled_time.as_secs_f64()) as u64;
        let before = header.read_bytes_per_second.load(Relaxed);
        let weighed = |bytes: u64, percent: u64| u128::from(bytes) * u128::from(percent);
        let mixed = match before {
            0 => measured,
            _ => ((weighed(before, 100 - SAMPLE_PERCENT) + weighed(measured, SAMPLE_PERCENT)) / 100) as u64,
        };
        header.read_bytes_per_second.store(mixed.max(1), Relaxed);
        (self.sampled, self.sampled_time) = (*now, Duration::ZERO);
    }
}
