//! The thread that page-locks segments: what jobs ask for first, then the rest in order.
//!
//! While the driver page-locks memory, every other thread that needs the driver waits, and a thread that asks again at
//! once is served before them. So the thread leaves the driver alone after each chunk: long enough for one waiter to
//! get its turn while the engine is idle, and most of the time while it starts or works.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::key::BlockRef;
use crate::shm::namespace::Namespace;
use crate::slot_space::Segment;

use super::driver::{Entered, Way};
use super::locked_segment::{Chunk, LockedSegment};
use super::registration::{AskedJob, Shared, Wanted};
use super::registration_progress::Reporter;
use super::touch::touch_meanwhile;

/// How often the thread looks for new segments and for those out of use.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// While the engine works, the driver is left alone for this many times as long as a chunk took.
const PAUSE_RATIO: u32 = 2;
const PAUSE_MIN: Duration = Duration::from_micros(500);
/// While it is idle: long enough for a thread that waits for the driver to wake up and take its turn.
const PAUSE_IDLE: Duration = Duration::from_micros(100);

/// Memory is mapped ahead of what is locked by at most this much.
const AHEAD_BYTES: usize = 1 << 30;

/// What the thread has before it.
#[derive(Default)]
struct Agenda {
    version: Option<u64>,
    /// Segments out of use that are still to be unlocked.
    leaving: Vec<Arc<LockedSegment>>,
    /// Chunks that jobs ask for; the last one first.
    urgent: Vec<Chunk>,
    reporter: Reporter,
}

impl Shared {
    pub(super) fn run(&self) {
        let entered = Entered::new(&*self.driver);
        if let Err(error) = &entered {
            self.give_up(&error.to_string());
        }
        let mut agenda = Agenda::default();
        while self.follow(&mut agenda) {
            let more = entered.is_ok() && self.advance(&mut agenda);
            let (locked, seen) = self.bytes();
            if let Some(line) = agenda.reporter.line(&self.work, locked, seen, more) {
                log::info!("{line}");
            }
            if !more {
                self.rest(LOOK_INTERVAL, |wanted| !wanted.changed && wanted.asked.is_empty());
            }
        }
    }

    /// Take in what has changed. `false`: it is time to stop.
    fn follow(&self, agenda: &mut Agenda) -> bool {
        let now = self.space.segments_version();
        let mut wanted = self.lock();
        if wanted.stop {
            return false;
        }
        let asked = std::mem::take(&mut wanted.asked);
        if std::mem::take(&mut wanted.changed) || agenda.version != Some(now) {
            let parts = wanted.parts.clone();
            drop(wanted);
            agenda.version = Some(now);
            let gone = self.list(&parts, &mut agenda.leaving);
            agenda.leaving.extend(gone);
            let leaving = &agenda.leaving;
            agenda.urgent.retain(|chunk| !leaving.iter().any(|gone| Arc::ptr_eq(gone, &chunk.segment)));
        } else {
            drop(wanted);
        }
        asked.iter().for_each(|job| self.prefer(job, &mut agenda.urgent));
        true
    }

    /// Take in new segments. Returns those out of use. One that was to be unlocked and is wanted again stays what it
    /// is: the driver does not lock memory twice, and a copy may still hold it.
    fn list(
        &self,
        parts: &[(Namespace, u32)],
        leaving: &mut Vec<Arc<LockedSegment>>,
    ) -> impl Iterator<Item = Arc<LockedSegment>> + use<> {
        let listed: BTreeMap<usize, Segment> = parts
            .iter()
            .flat_map(|(namespace, part)| self.space.segments(*namespace, *part))
            .map(|segment| (segment.address, segment))
            .collect();
        let mut segments = self.write_segments();
        let (kept, gone): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut *segments).into_iter().partition(|(address, _)| listed.contains_key(address));
        *segments = kept;
        for (address, segment) in listed {
            if let Entry::Vacant(place) = segments.entry(address) {
                let back = leaving.iter().position(|gone| gone.is(&segment)).map(|found| leaving.swap_remove(found));
                place.insert(back.unwrap_or_else(|| {
                    Arc::new(LockedSegment::new(Arc::clone(&self.driver), segment, self.chunk_bytes))
                }));
            }
        }
        gone.into_values()
    }

    /// Put the chunks of a job before all others, its last ones first: the copies go the other way round, and what is
    /// not locked when they come to it they move by other means.
    fn prefer(&self, job: &AskedJob, urgent: &mut Vec<Chunk>) {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let slot_of = |block: BlockRef| match job.way {
            Way::ToHost => self.space.write_target(block, job.part),
            Way::ToDevice => self.space.read_source(block, job.part),
        };
        let (mut chosen, mut chunks) = (BTreeSet::new(), Vec::new());
        for slot in job.refs.iter().filter_map(|block| slot_of(*block)) {
            let host = slot.address.addr();
            let below = segments.range(..=host).next_back().map(|(_, segment)| segment);
            let Some(segment) = below.filter(|found| slot.bytes > 0 && host + slot.bytes <= found.end()) else {
                continue;
            };
            for index in segment.chunk_at(host)..=segment.chunk_at(host + slot.bytes - 1) {
                let chunk = Chunk { segment: Arc::clone(segment), index };
                if !segment.is_locked(index) && chosen.insert(chunk.key()) {
                    chunks.push(chunk);
                }
            }
        }
        urgent.retain(|chunk| !chunk.segment.is_locked(chunk.index) && !chosen.contains(&chunk.key()));
        urgent.append(&mut chunks);
    }

    /// Do some of what there is to do. `false`: there is nothing.
    fn advance(&self, agenda: &mut Agenda) -> bool {
        if let Some(busy) = unlock_next(&mut agenda.leaving) {
            let started = Instant::now();
            self.pause(busy);
            self.work.add(busy + started.elapsed(), busy, 0);
            return true;
        }
        if self.lock().problem.is_some() {
            return false;
        }
        let ahead = (AHEAD_BYTES / self.chunk_bytes).max(1);
        let urgent = agenda.urgent.len().min(ahead);
        let chunks: Vec<Chunk> = match urgent {
            0 => self.unlocked(ahead),
            _ => agenda.urgent.drain(agenda.urgent.len() - urgent..).rev().collect(),
        };
        let version = agenda.version;
        let locked = touch_meanwhile(&chunks, self.touch_threads, || {
            let go_on = |chunk: &&Chunk| !self.is_interrupted(version) && self.lock_one(chunk);
            chunks.iter().take_while(go_on).count()
        });
        if urgent > 0 {
            agenda.urgent.extend(chunks[locked..].iter().rev().cloned());
        }
        !chunks.is_empty()
    }

    /// The first few chunks that are not locked.
    fn unlocked(&self, most: usize) -> Vec<Chunk> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let chunks_of = |segment: &Arc<LockedSegment>| {
            let own = segment.unlocked().take(most).collect::<Vec<_>>();
            own.into_iter().map(|index| Chunk { segment: Arc::clone(segment), index }).collect::<Vec<_>>()
        };
        segments.values().filter(|one| one.locked_bytes() < one.bytes()).flat_map(chunks_of).take(most).collect()
    }

    /// Whether there is something that goes before the chunks in hand.
    fn is_interrupted(&self, version: Option<u64>) -> bool {
        let wanted = self.lock();
        wanted.stop || wanted.changed || !wanted.asked.is_empty() || version != Some(self.space.segments_version())
    }

    /// Lock a chunk, and leave the driver alone for a while. `false`: there will be no more.
    fn lock_one(&self, chunk: &Chunk) -> bool {
        let (started, before) = (Instant::now(), chunk.segment.locked_bytes());
        match chunk.segment.lock_chunk(chunk.index) {
            Ok(busy) => {
                if !busy.is_zero() {
                    self.pause(busy);
                }
                self.work.add(started.elapsed(), busy, chunk.segment.locked_bytes() - before);
                true
            }
            Err(error) => {
                self.give_up(&error.to_string());
                false
            }
        }
    }

    fn pause(&self, busy: Duration) {
        self.rest(pause_after(busy, self.activity.is_busy()), |_| true);
    }

    /// Sleep for so long, while `idle` and not told to stop.
    fn rest(&self, duration: Duration, idle: impl Fn(&Wanted) -> bool) {
        let go_on = |wanted: &mut Wanted| !wanted.stop && idle(wanted);
        drop(self.bell.wait_timeout_while(self.lock(), duration, go_on).unwrap_or_else(PoisonError::into_inner));
    }

    fn give_up(&self, reason: &str) {
        log::warn!(
            "pegaflow: memory of the pool cannot be page-locked ({reason}); copies go through small buffers, which is \
             slower: raise the limit of locked memory (ulimit -l)"
        );
        self.lock().problem = Some(reason.to_owned());
    }
}

/// How long to leave the driver alone after it was busy for so long.
fn pause_after(busy: Duration, engine_works: bool) -> Duration {
    if engine_works { PAUSE_MIN.max(busy * PAUSE_RATIO) } else { PAUSE_IDLE }
}

/// Unlock one chunk of a segment that no copy holds any more, or let go of it. Returns how long that kept the driver
/// busy; `None` if there is none.
fn unlock_next(leaving: &mut Vec<Arc<LockedSegment>>) -> Option<Duration> {
    // Nobody can come to hold it anew: it is out of the list.
    let free = leaving.iter().position(|segment| Arc::strong_count(segment) == 1)?;
    let busy = leaving[free].unlock_last();
    if busy.is_none() {
        leaving.swap_remove(free);
    }
    busy.or(Some(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_left_alone_most_of_the_time_only_while_the_engine_works() {
        let chunk = Duration::from_millis(1);
        assert_eq!(pause_after(chunk, true), 2 * chunk);
        assert!(pause_after(Duration::ZERO, true) > Duration::ZERO);
        assert!(pause_after(chunk, false) * 5 < chunk, "an idle engine has its memory locked at nearly full speed");
        assert!(pause_after(chunk, false) > Duration::ZERO, "whoever waits for the driver gets a turn");
    }
}
