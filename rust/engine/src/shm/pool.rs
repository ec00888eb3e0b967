//! The face of a pool: checks, then hands over to the files by role.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

use crate::config::OpenOptions;
use crate::error::Result;
use crate::key::{BlockRef, Key};
use crate::shm::core::Core;
use crate::shm::extent::Extent;
use crate::shm::file::Place;
use crate::shm::names::{check_pool_name, pool_dir, segment_file};
use crate::shm::namespace::{Namespace, NamespaceInfo};
use crate::shm::policy::policy_number;
use crate::shm::process::Member;
use crate::shm::shares::{Share, weight_milli};
use crate::shm::state::{SlotState, State};
use crate::shm::{maintenance, open};
use crate::slot_space::SlotSpace;
use crate::sync::Acquire;

/// An attached pool; one per process and directory. Dropping the last handle leaves the pool.
pub struct Pool {
    core: Arc<Core>,
    shm_dir: PathBuf,
    path: PathBuf,
    created: bool,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("name", &self.core.name).field("path", &self.path).finish_non_exhaustive()
    }
}

static OPEN: Mutex<Option<HashMap<PathBuf, Weak<Pool>>>> = Mutex::new(None);

impl Pool {
    /// Attach to pool `name`, creating it if the options allow. Opening it again gives the same pool.
    pub fn open(name: &str, options: &OpenOptions) -> Result<Arc<Self>> {
        check_pool_name(name)?;
        let weight = options.weight.map(weight_milli).transpose()?;
        let policy = options.policy.as_deref().map(policy_number).transpose()?;
        if options.private {
            return Self::attach(name, options, PathBuf::new());
        }
        let path = pool_dir(&options.shm_dir, nix::unistd::geteuid().as_raw(), name);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        if let Some(pool) = open.get(&path).and_then(Weak::upgrade)
            && pool.core.check_usable().is_ok()
        {
            if let Some(weight) = weight {
                pool.core.set_weight(weight);
            }
            if let Some(policy) = policy {
                pool.core.set_policy(policy);
            }
            return Ok(pool);
        }
        let pool = Self::attach(name, options, path.clone())?;
        open.retain(|_, pool| pool.strong_count() > 0);
        open.insert(path, Arc::downgrade(&pool));
        Ok(pool)
    }

    fn attach(name: &str, options: &OpenOptions, path: PathBuf) -> Result<Arc<Self>> {
        let (core, created) = open::open(name, options)?;
        if let Some(weight) = options.weight.map(weight_milli).transpose()? {
            core.set_weight(weight);
        }
        if let Some(policy) = options.policy.as_deref().map(policy_number).transpose()? {
            core.set_policy(policy);
        }
        let core = Arc::new(core);
        let threads = maintenance::start(&core)?;
        Ok(Arc::new(Self { core, shm_dir: options.shm_dir.clone(), path, created, threads }))
    }

    /// Name of the pool.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// Directory of its files; empty for a private pool.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the pool's directory lies.
    pub fn shm_dir(&self) -> &Path {
        &self.shm_dir
    }

    /// Bytes of data segments at most.
    pub fn pool_bytes(&self) -> u64 {
        self.core.control.geometry().pool_bytes
    }

    /// Bytes of one data segment.
    pub fn segment_bytes(&self) -> u64 {
        self.core.control.geometry().segment_bytes
    }

    /// Slots at most.
    pub fn slots_max(&self) -> u64 {
        self.core.control.geometry().slots_max
    }

    /// Whether this process created the pool.
    pub fn created(&self) -> bool {
        self.created
    }

    /// The pool as a copy engine sees it.
    pub fn space(&self) -> Arc<dyn SlotSpace> {
        Arc::clone(&self.core) as Arc<dyn SlotSpace>
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    #[cfg(not(loom))]
    pub(crate) fn shared_core(&self) -> &Arc<Core> {
        &self.core
    }

    /// This process in the process table.
    pub fn member(&self) -> Result<Member> {
        self.core.check_usable()?;
        Ok(self.core.me)
    }

    /// Declare that this process moves bytes for `leader`.
    pub fn join(&self, leader: Member) -> Result<()> {
        self.core.check_usable()?;
        self.core.join(leader)
    }

    /// Say that devices write this process's slots: after its death they wait in quarantine before reuse.
    pub fn set_device_writes(&self) -> Result<()> {
        self.core.check_usable()?;
        self.core.set_device_writes();
        Ok(())
    }

    /// Find or create the namespace of a fingerprint and group, with the bytes of each part.
    pub fn namespace(&self, fingerprint: &[u8; 32], group: u32, part_bytes: &[u64], label: &str) -> Result<Namespace> {
        self.core.check_usable()?;
        let ns = self.core.namespace(fingerprint, group, part_bytes, label)?;
        self.core.enter(ns);
        #[cfg(not(loom))]
        self.core.open_traffic();
        Ok(ns)
    }

    /// How many other living processes use the namespace for themselves, not for a leader.
    pub fn others_in(&self, ns: Namespace) -> Result<usize> {
        self.core.check_usable()?;
        Ok(self.core.others_in(ns))
    }

    /// Sizes of a namespace.
    pub fn namespace_info(&self, ns: Namespace) -> Result<NamespaceInfo> {
        self.core.namespace_info(ns)
    }

    /// How many consecutive `keys[start..]` are present. Takes no lock.
    pub fn lookup(&self, ns: Namespace, keys: &[Key], start: usize) -> Result<usize> {
        self.core.check_usable()?;
        let identity = self.core.identity(ns)?;
        let mut run = 0;
        self.core.find_many(&identity, keys.get(start..).unwrap_or(&[]), |found| {
            run += usize::from(found.is_some());
            found.is_some()
        });
        self.core.stats.lookups.add(1);
        self.core.stats.lookup_blocks_hit.add(run as u64);
        Ok(run)
    }

    /// Which keys are present. Takes no lock.
    pub fn contains(&self, ns: Namespace, keys: &[Key]) -> Result<Vec<bool>> {
        self.core.check_usable()?;
        let identity = self.core.identity(ns)?;
        let mut present = Vec::with_capacity(keys.len());
        self.core.find_many(&identity, keys, |found| {
            present.push(found.is_some());
            true
        });
        self.core.stats.lookups.add(1);
        self.core.stats.lookup_blocks_hit.add(present.iter().filter(|present| **present).count() as u64);
        Ok(present)
    }

    /// Pin the longest run of present `keys[start..stop]` and refresh it with what is present before it.
    pub fn lease(&self, ns: Namespace, keys: &[Key], start: usize, stop: usize) -> Result<Vec<BlockRef>> {
        self.core.check_usable()?;
        self.core.lease(ns, keys, start, stop)
    }

    /// Refresh what is present of a chain.
    pub fn touch(&self, ns: Namespace, keys: &[Key]) -> Result<usize> {
        self.core.check_usable()?;
        self.core.touch(ns, keys)
    }

    /// Give up one lease per block. All are given up even if one is an error.
    pub fn release(&self, blocks: &[BlockRef]) -> Result<()> {
        self.core.check_usable()?;
        let mut outcome = Ok(());
        for block in blocks {
            outcome = outcome.and(self.core.unpin(*block));
        }
        outcome
    }

    /// Reserve a slot for each absent key: `(index of the key, block)`, stopping at the first that gets none.
    pub fn reserve(
        &self,
        ns: Namespace,
        keys: &[Key],
        parents: Option<&[Option<Key>]>,
        evict: bool,
    ) -> Result<Vec<(usize, BlockRef)>> {
        self.core.check_usable()?;
        self.core.reserve(ns, keys, parents, evict)
    }

    /// Make reserved blocks visible, in order; what cannot be is freed. Returns how many became visible.
    pub fn publish(&self, blocks: &[BlockRef]) -> Result<usize> {
        self.core.check_usable()?;
        Ok(self.core.publish(blocks))
    }

    /// Free reserved blocks that nobody can still write.
    pub fn abort(&self, blocks: &[BlockRef]) -> Result<()> {
        self.core.check_usable()?;
        self.core.abort(blocks);
        Ok(())
    }

    /// Give up reserved blocks that somebody may still be writing.
    pub fn quarantine(&self, blocks: &[BlockRef]) -> Result<()> {
        self.core.check_usable()?;
        self.core.quarantine(blocks);
        Ok(())
    }

    /// Record that `part` of these blocks is complete in memory. Returns how many were reserved.
    pub fn mark_written(&self, part: u32, blocks: &[BlockRef], checksums: Option<&[u64]>) -> Result<usize> {
        self.core.check_usable()?;
        if checksums.is_some_and(|checksums| checksums.len() != blocks.len()) {
            return Err(crate::Error::invalid("checksums and refs differ in number: give one checksum per ref"));
        }
        let mut marked = 0;
        for (position, block) in blocks.iter().enumerate() {
            let checksum = checksums.map(|checksums| checksums[position]);
            marked += usize::from(self.core.mark_part_written(*block, part, checksum)?);
        }
        Ok(marked)
    }

    /// File, offset and length of one part of a block; `None` if the block is stale or the pool private.
    pub fn locate(&self, block: BlockRef, part: u32) -> Result<Option<(PathBuf, u64, u64)>> {
        self.core.check_usable()?;
        let core = &self.core;
        let live = core.control.slot(block.slot()).and_then(|header| {
            SlotState::decode(header.state.load(Acquire))
                .filter(|state| state.generation == block.generation() && state.state != State::Free)
        });
        let Some((extent, offset, bytes)) = live.and_then(|_| core.place_of(block, part)) else { return Ok(None) };
        match &core.home.place {
            Place::Directory(dir, _) => {
                Ok(Some((dir.join(segment_file(extent.segments[part as usize])), offset, bytes)))
            }
            Place::Anonymous => Ok(None),
        }
    }

    /// Near which NUMA nodes this process makes memory for the parts of a namespace, for segments to come; `None`:
    /// anywhere.
    pub fn set_nodes(&self, ns: Namespace, nodes: Vec<Option<u32>>) -> Result<()> {
        self.core.check_usable()?;
        let parts = self.core.namespace_info(ns)?.part_bytes.len();
        if nodes.len() != parts {
            return Err(crate::Error::invalid(format!(
                "the namespace has {parts} parts, not {}: give one node (or None) for each",
                nodes.len()
            )));
        }
        self.core.nodes.lock().unwrap_or_else(PoisonError::into_inner).insert(ns.0, nodes);
        Ok(())
    }

    /// Have the background thread create the namespace's first or next segments.
    pub fn grow_ahead(&self, ns: Namespace) -> Result<()> {
        self.core.check_usable()?;
        if self.core.may_grow(ns) || self.core.extents(ns).is_empty() {
            self.core.ask_to_grow(ns);
        }
        Ok(())
    }

    /// What this instance may keep of the pool whatever others do, and what is on its account.
    pub fn share(&self) -> Result<Share> {
        self.core.check_usable()?;
        Ok(self.core.shares().of(self.core.me.row))
    }

    /// Invalidate every block of the namespace, and of all groups of its fingerprint, for all processes. Returns the
    /// new epoch. Where the namespace takes part in an SSD tier, waits a bounded time until that has forgotten too; it
    /// is an error of kind *busy* if it has not, and then only a crash of the host right now would bring blocks back.
    pub fn reset(&self, ns: Namespace) -> Result<u64> {
        let epoch = self.reset_memory(ns)?;
        #[cfg(not(loom))]
        self.core.wait_until_forgotten(ns, epoch)?;
        Ok(epoch)
    }

    /// [`Pool::reset`] without the wait: an SSD tier takes note later.
    pub fn reset_memory(&self, ns: Namespace) -> Result<u64> {
        self.core.check_usable()?;
        self.core.reset(ns)
    }

    /// Clean up after dead processes. Returns how many rows were.
    pub fn reap(&self) -> Result<usize> {
        self.core.check_usable()?;
        let reaped = self.core.reap();
        self.core.drop_orphans();
        Ok(reaped)
    }

    /// Rebuild the index from the slot headers. Returns how many blocks it holds.
    pub fn rebuild_index(&self) -> Result<usize> {
        self.core.check_usable()?;
        self.core.rebuild_index()
    }

    /// Counters and gauges.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        let mut stats = self.core.stats.snapshot();
        stats.push(("bytes_used", self.core.bytes_used()));
        stats.push(("bytes_max", self.pool_bytes()));
        let share = self.core.shares().of(self.core.me.row);
        stats.push(("share_bytes", share.bytes));
        stats.push(("share_used_bytes", share.used_bytes));
        stats
    }

    /// Slots of a namespace by state.
    pub fn namespace_stats(&self, ns: Namespace) -> Result<Vec<(&'static str, u64)>> {
        self.core.check_usable()?;
        let (mut slots, mut free, mut sealed, mut reserved) = (0, 0, 0, 0);
        for slot in self.core.extents(ns).iter().flat_map(Extent::slots) {
            slots += 1;
            let Some(header) = self.core.control.slot(slot) else { continue };
            match SlotState::decode(header.state.load(Acquire)).map(|state| state.state) {
                Some(State::Free) => free += 1,
                Some(State::Sealed) => sealed += 1,
                Some(State::Reserved) => reserved += 1,
                _ => {}
            }
        }
        Ok(vec![("slots", slots), ("slots_free", free), ("blocks_sealed", sealed), ("blocks_reserved", reserved)])
    }

    /// Why the pool could not grow last time.
    pub fn last_grow_error(&self) -> Option<String> {
        self.core.grow_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.core.lock_file.forked() {
            // The threads do not exist in this process; nothing here is ours.
            std::mem::forget(std::mem::take(&mut self.threads));
            return;
        }
        #[cfg(not(loom))]
        self.core.tier.stop(&self.core.name);
        self.core.ask_to_stop();
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != std::thread::current().id()) {
            if thread.join().is_err() {
                log::error!("pegaflow: a background thread of pool {} had panicked", self.core.name);
            }
        }
    }
}
