//! Loads that a forward pass may overtake: they arrive in stages, and each stage has an event to wait for.

use std::collections::HashMap;

use crate::copy::{JobId, KvLayout};
use crate::error::{Error, Result};
use crate::limits::LOAD_STAGES_MAX;

use super::driver::Event;

/// Followed loads that are not over.
#[derive(Default)]
pub(super) struct FollowedLoads {
    /// Events of the stages that were handed to the device, by job.
    stages: HashMap<JobId, Vec<Event>>,
    /// Jobs of which all was handed to the device, and that nobody was told of yet.
    queued: Vec<JobId>,
}

impl FollowedLoads {
    /// `job` was handed to the device up to and including these stages.
    pub(super) fn publish(&mut self, job: JobId, events: Vec<Event>, all: bool) {
        self.stages.insert(job, events);
        if all {
            self.queued.push(job);
        }
    }

    /// Jobs of which all was handed to the device since the last call.
    pub(super) fn take_queued(&mut self) -> Vec<JobId> {
        std::mem::take(&mut self.queued)
    }

    /// The event behind which `stage` of `job` is in place; `None`: it is.
    pub(super) fn event(&self, job: JobId, stage: usize) -> Result<Option<Event>> {
        let Some(events) = self.stages.get(&job) else { return Ok(None) };
        match events.get(stage) {
            Some(event) => Ok(Some(*event)),
            None => Err(Error::invalid(format!(
                "stage {stage} of copy {job} was not handed to the device yet: wait until take_queued names the copy"
            ))),
        }
    }

    /// `job` is over: nobody has to wait for it any more.
    pub(super) fn forget(&mut self, job: JobId) {
        self.stages.remove(&job);
        self.queued.retain(|other| *other != job);
    }
}

/// Where the stages of a load end within a block: as asked for, or all at once.
pub(super) fn stage_ends(wanted: Option<&[usize]>, layout: &KvLayout) -> Result<Vec<usize>> {
    let Some(ends) = wanted else { return Ok(vec![layout.block_bytes()]) };
    let ascending = ends.first().is_some_and(|end| *end > 0) && ends.windows(2).all(|pair| pair[0] < pair[1]);
    if !ascending || ends.last() != Some(&layout.block_bytes()) || ends.len() > LOAD_STAGES_MAX {
        return Err(Error::invalid(format!(
            "stages of a load must be at most {LOAD_STAGES_MAX} ascending ends within a block, the last of them the \
             block's {} bytes, not {ends:?}",
            layout.block_bytes()
        )));
    }
    Ok(ends.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::Region;

    #[test]
    fn stages_must_end_with_the_block_and_ascend() {
        let region = Region { address: 4096, stride_bytes: 64, length_bytes: 64 };
        // SAFETY: the layout is never used in a job.
        let layout = unsafe { KvLayout::new(&[region], 4) }.unwrap();
        assert_eq!(stage_ends(None, &layout).unwrap(), [64]);
        assert_eq!(stage_ends(Some(&[16, 64]), &layout).unwrap(), [16, 64]);
        for wrong in [&[][..], &[0, 64], &[32], &[32, 32, 64], &[64, 128], &[48, 16, 64]] {
            assert!(stage_ends(Some(wrong), &layout).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_load_that_is_over_needs_no_event() {
        let mut followed = FollowedLoads::default();
        followed.publish(7, vec![Event(1)], false);
        assert_eq!(followed.event(7, 0).unwrap(), Some(Event(1)));
        assert!(followed.event(7, 1).is_err());
        followed.publish(7, vec![Event(1), Event(2)], true);
        assert_eq!(followed.event(7, 1).unwrap(), Some(Event(2)));
        assert_eq!(followed.take_queued(), [7]);
        assert!(followed.take_queued().is_empty());
        followed.forget(7);
        assert_eq!(followed.event(7, 1).unwrap(), None);
    }
}
