//! Recency: one stamp per slot from a clock shared by all processes.
//!
//! The rule that keeps prefixes whole: **a block's stamp is always lower than that of the block before it in its
//! chain**. Touching a chain gives the head the highest stamp, and stores heads first; stamps only rise while a block
//! is sealed; a new block starts below its parent. So eviction in the order of stamps eats tails before heads. How far
//! below the newest a new block starts is the policy's to say (`policy/mod.rs`).
//!
//! The low byte of a stamp says on whose account the block is: whoever used it last (see `shares.rs`).

use crate::key::BlockRef;
use crate::limits::PROCESSES_MAX;
use crate::shm::core::Core;
use crate::shm::namespace::Namespace;
use crate::shm::open::CLOCK_START;
use crate::shm::policy::{Start, policy};
use crate::sync::{Relaxed, SeqCst};

/// Times that a chain is touched again because there is another block before it now.
const TOUCHES_MAX: usize = 4;

/// A block of a chain that is being touched.
struct Link {
    block: BlockRef,
    /// What its header said is before it.
    before: BlockRef,
    /// Not one of those that the caller holds.
    pinned_here: bool,
}

const OWNER_BITS: u32 = 8;

/// A stamp: when a block was used last, and the row on whose account it is.
pub(crate) fn stamp_word(tick: u64, owner: Option<u32>) -> u64 {
    tick << OWNER_BITS | owner.map_or(0, |row| u64::from(row) + 1)
}

/// When a block was used last.
pub(crate) fn tick_of(stamp: u64) -> u64 {
    stamp >> OWNER_BITS
}

/// The row on whose account a block is; `None` for nobody's, and for rows that do not exist.
pub(crate) fn owner_of(stamp: u64) -> Option<u32> {
    (stamp as u8 as u32).checked_sub(1).filter(|row| (*row as usize) < PROCESSES_MAX)
}

/// On whose account blocks are after they were refreshed.
#[derive(Clone, Copy)]
enum Account {
    /// The instance in this row has used them.
    Of(u32),
    /// They only had to get out of the way.
    Unchanged,
}

impl Core {
    /// Give a chain (head first; all pinned by the caller) new stamps, and the blocks before it higher ones. The caller
    /// may not have found all of the chain: those between are touched with it.
    pub(crate) fn stamp_chain(&self, chain: &[BlockRef]) {
        self.refresh(chain, Account::Of(self.me.row), |links| self.tick(links));
    }

    /// `newest` says which time the first of so many blocks gets. Returns how many blocks were given new stamps, each
    /// as often as it was.
    fn refresh(&self, chain: &[BlockRef], account: Account, newest: impl Fn(u64) -> u64) -> usize {
        let mut refreshed = 0;
        for _ in 0..TOUCHES_MAX {
            let links = self.links_of(chain);
            refreshed += links.len();
            let newest = newest(links.len() as u64);
            for (position, link) in links.iter().enumerate() {
                self.raise_stamp(link.block.slot(), newest.saturating_sub(position as u64), account);
                crate::crash_point::pass("touch.stamped");
            }
            // A rebuild of the index may have put another block before one of these.
            let same = links.iter().all(|link| self.before(link.block) == link.before);
            for link in links.iter().filter(|link| link.pinned_here) {
                if let Err(error) = self.unpin(link.block) {
                    log::error!("pegaflow: {error}");
                }
            }
            if same {
                break;
            }
        }
        refreshed
    }

    /// Give the chain that ends in `tail`, which is pinned by the caller, times above the horizon: `time` and down from
    /// there, if they fit between, else the newest. It is used by the instance in row `account`.
    pub(crate) fn raise_chain_of(&self, tail: BlockRef, account: u32, time: u64, horizon: u64) {
        let fits = |links| time.saturating_sub(links) > horizon;
        self.refresh(&[tail], Account::Of(account), |links| if fits(links) { time } else { self.tick(links) });
    }

    /// Refresh the chain that ends in `tail`, which is pinned by the caller, on the accounts of whoever used its blocks
    /// last.
    pub(crate) fn guard_chain_of(&self, tail: BlockRef) -> usize {
        self.refresh(&[tail], Account::Unchanged, |links| self.tick(links))
    }

    fn raise_stamp(&self, slot: u32, tick: u64, account: Account) {
        let stamp = self.control.stamp(slot);
        if let Account::Of(row) = account {
            stamp.fetch_max(stamp_word(tick, Some(row)), SeqCst);
            return;
        }
        let mut before = stamp.load(SeqCst);
        while tick_of(before) < tick {
            match stamp.compare_exchange(before, stamp_word(tick, owner_of(before)), SeqCst, Relaxed) {
                Ok(_) => return,
                Err(now) => before = now,
            }
        }
    }

    /// Take a block off the account of a row whose process is gone.
    pub(crate) fn disown(&self, slot: u32, row: u32) {
        let stamp = self.control.stamp(slot);
        let mut before = stamp.load(SeqCst);
        while owner_of(before) == Some(row) {
            match stamp.compare_exchange(before, stamp_word(tick_of(before), None), SeqCst, Relaxed) {
                Ok(_) => return,
                Err(now) => before = now,
            }
        }
    }

    /// Take `count` ticks of the shared clock; returns the last.
    fn tick(&self, count: u64) -> u64 {
        self.control.header().clock.fetch_add(count, SeqCst).wrapping_add(count)
    }

    /// The chain with all that its headers say is before and between its blocks, head first; what is added is pinned.
    fn links_of(&self, chain: &[BlockRef]) -> Vec<Link> {
        let mut links: Vec<Link> = Vec::with_capacity(chain.len());
        let mut last = BlockRef(0);
        for block in chain {
            let start = links.len();
            links.push(Link { block: *block, before: self.before(*block), pinned_here: false });
            // Damaged links may form a circle: whoever comes back to a place that is looked at again and again is in
            // one.
            let mut landmark = *block;
            while let Some(Link { before, .. }) = links.last()
                && before.0 != 0
                && *before != last
                && *before != landmark
                && self.pin(*before)
            {
                let block = *before;
                links.push(Link { block, before: self.before(block), pinned_here: true });
                if (links.len() - start).is_power_of_two() {
                    landmark = block;
                }
            }
            links[start..].reverse();
            last = *block;
        }
        links
    }

    /// The block before this one, as its header says; 0 for none.
    fn before(&self, block: BlockRef) -> BlockRef {
        BlockRef(self.control.slot(block.slot()).map_or(0, |header| header.parent.load(SeqCst)))
    }

    /// When a new block of the namespace starts by this process's policy, if all up to `horizon` was on a list of what
    /// goes. Each takes a tick, so that time passes as fast as blocks come.
    pub(crate) fn first_time(&self, ns: Namespace, horizon: u64, returns: bool) -> u64 {
        let now = self.tick(1);
        let begun = self.control.namespaces()[ns.0 as usize].begun.load(Relaxed);
        let oldest = horizon.max(begun).max(CLOCK_START).min(now);
        policy(self.policy.load(Relaxed)).time(Start { oldest, now, returns })
    }

    /// Stamp of a new block of the instance in row `account` that starts at `time`, or below its parent if that is
    /// earlier.
    pub(crate) fn stamp_below_parent(&self, time: u64, parent: Option<BlockRef>, account: u32) -> u64 {
        let limit = parent.map(|parent| tick_of(self.control.stamp(parent.slot()).load(SeqCst)).saturating_sub(1));
        stamp_word(limit.map_or(time, |limit| time.min(limit)).max(1), Some(account))
    }

    /// Choose by number where blocks of this process start.
    pub(crate) fn set_policy(&self, number: u32) {
        self.policy.store(number, Relaxed);
    }
}
