//! Copies between the blocks of a KV cache in host memory and the slots of a pool.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::key::BlockRef;
use crate::limits::COPY_ITEMS_QUEUED_MAX;
use crate::slot_space::SlotSpace;

use super::copy_part::PartCopy;
use super::layout::KvLayout;
use super::queue::{CopyDone, JobId, NewJob, Work};
use super::stream::StreamOptions;
use super::threads::CopyThreads;

/// A thread takes about this many bytes at once: long enough that the queue's lock does not matter, short enough that
/// all threads finish a job together.
const BATCH_BYTES: usize = 1 << 20;

/// Jobs of at least this many bytes store around the cache: they are larger than what a core's own cache can keep.
const STREAMING_JOB_BYTES_MIN: usize = 2 << 20;

/// Copies blocks on its own threads. A job completes once, when its last byte is in place. Loads are begun before
/// saves, since a request waits for them.
pub struct HostCopier {
    space: Arc<dyn SlotSpace>,
    threads: CopyThreads,
    checksum: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Save,
    Load,
}

struct BlockJob {
    space: Arc<dyn SlotSpace>,
    layout: Arc<KvLayout>,
    direction: Direction,
    part: u32,
    options: StreamOptions,
    refs: Vec<BlockRef>,
    block_ids: Vec<u32>,
}

impl HostCopier {
    /// A copier for the slots of `space` on `threads` threads (0: see [`CopyThreads::new`]). `checksum`: compute one
    /// for every part on save, compare on load where one was stored.
    pub fn new(space: Arc<dyn SlotSpace>, threads: usize, checksum: bool) -> Result<Self> {
        Ok(Self { space, threads: CopyThreads::new(threads)?, checksum })
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads.count()
    }

    /// Start copying block `block_ids[i]` into the reserved slot `refs[i]`, for all `i`. Each part is marked written
    /// as it completes. What could not be copied is in [`CopyDone::failed`].
    pub fn save(&self, part: u32, layout: &Arc<KvLayout>, refs: Vec<BlockRef>, block_ids: Vec<u32>) -> Result<JobId> {
        self.start(Direction::Save, part, layout, refs, block_ids)
    }

    /// Start copying the leased slot `refs[i]` into block `block_ids[i]`, for all `i`. The ids must differ. The bytes
    /// of a block in [`CopyDone::failed`] are not to be used.
    pub fn load(&self, part: u32, layout: &Arc<KvLayout>, refs: Vec<BlockRef>, block_ids: Vec<u32>) -> Result<JobId> {
        self.start(Direction::Load, part, layout, refs, block_ids)
    }

    fn start(
        &self,
        direction: Direction,
        part: u32,
        layout: &Arc<KvLayout>,
        refs: Vec<BlockRef>,
        block_ids: Vec<u32>,
    ) -> Result<JobId> {
        if refs.len() != block_ids.len() {
            return Err(Error::invalid(format!(
                "a copy job has one block id per ref, this one has {} refs and {} ids: pass lists of equal length",
                refs.len(),
                block_ids.len()
            )));
        }
        if refs.len() > COPY_ITEMS_QUEUED_MAX {
            return Err(Error::invalid(format!(
                "a copy job has at most {COPY_ITEMS_QUEUED_MAX} blocks, this one has {}: split it",
                refs.len()
            )));
        }
        layout.check_ids(&block_ids)?;
        let items = refs.len();
        let job_bytes = items.saturating_mul(layout.block_bytes());
        let options = StreamOptions { checksum: self.checksum, streaming: job_bytes >= STREAMING_JOB_BYTES_MIN };
        let layout = Arc::clone(layout);
        let batch_items = (BATCH_BYTES / layout.block_bytes()).clamp(1, items.div_ceil(self.threads()).max(1));
        let space = Arc::clone(&self.space);
        let work = Arc::new(BlockJob { space, layout, direction, part, options, refs, block_ids });
        self.threads.start(NewJob { work, items, batch_items, urgent: direction == Direction::Load })
    }

    /// See [`CopyThreads::poll`].
    pub fn poll(&self) -> Result<Vec<CopyDone>> {
        self.threads.poll()
    }

    /// See [`CopyThreads::wait`].
    pub fn wait(&self, timeout: Duration) -> Result<Vec<CopyDone>> {
        self.threads.wait(timeout)
    }

    /// See [`CopyThreads::in_flight`].
    pub fn in_flight(&self) -> Result<usize> {
        self.threads.in_flight()
    }

    /// See [`CopyThreads::close`].
    pub fn close(&self) -> Result<()> {
        self.threads.close()
    }
}

impl Work for BlockJob {
    fn run(&self, batch: Range<usize>, failed: &mut Vec<u32>) -> u64 {
        let copy = PartCopy { space: &*self.space, layout: &self.layout, part: self.part, options: self.options };
        let mut copied = 0;
        for index in batch {
            let (block, block_id) = (self.refs[index], self.block_ids[index]);
            let ok = match self.direction {
                Direction::Save => copy.save(block, block_id),
                Direction::Load => copy.load(block, block_id),
            };
            if ok {
                copied += self.layout.block_bytes() as u64;
            } else {
                failed.push(index as u32);
            }
        }
        copied
    }
}
