//! Which blocks of a namespace may go, and which have to be taken out of the way of those.
//!
//! Victims are the oldest of: blocks on nobody's account, what other instances have beyond their shares, and the
//! evictor's own, unless it is below its share while others are above theirs. Only the order of stamps keeps heads from
//! going before their tails, so what is older than a victim and must stay gets a new stamp first, its chain with it.

use crate::limits::GUARDED_MAX;
use crate::shm::recency::owner_of;
use crate::shm::shares::Shares;

/// A stamp and the slot that has it.
pub(crate) type Stamped = (u64, u32);

/// Who wants room.
#[derive(Clone, Copy)]
pub(crate) struct Evictor {
    pub(crate) row: u32,
    /// Nothing else was to be had: its own blocks go even if it is below its share.
    pub(crate) own: bool,
    /// Shares are not looked at.
    pub(crate) any: bool,
}

/// Outcome of a choice; both oldest first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Victims {
    pub(crate) victims: Vec<Stamped>,
    /// Older than some victim, and to be refreshed before it goes.
    pub(crate) guarded: Vec<Stamped>,
}

/// Whether the evictor's own blocks stay because others have too much among these.
pub(crate) fn spares_own(blocks: &[Stamped], shares: &Shares, evictor: Evictor) -> bool {
    let mine = shares.of(evictor.row);
    let others_exceed = |block: &Stamped| {
        let others = owner_of(block.0).filter(|row| *row != evictor.row && shares.is_instance(*row));
        others.is_some_and(|row| shares.of(row).excess_bytes() > 0)
    };
    !evictor.any && !evictor.own && mine.used_bytes < mine.bytes && blocks.iter().any(others_exceed)
}

/// How victims are chosen.
#[derive(Clone, Copy)]
pub(crate) struct Choice<'a> {
    /// Of each block.
    pub(crate) slot_bytes: u64,
    pub(crate) shares: &'a Shares,
    pub(crate) evictor: Evictor,
    /// See [`spares_own`].
    pub(crate) spares_own: bool,
    /// So many victims at most.
    pub(crate) wanted: usize,
}

impl Choice<'_> {
    /// Choose of these.
    pub(crate) fn of(&self, blocks: Vec<Stamped>) -> Victims {
        let Self { shares, evictor, wanted, .. } = *self;
        let (mut victims, mut guarded) = (blocks, Vec::new());
        victims.retain(|block| {
            let goes = match owner_of(block.0).filter(|row| !evictor.any && shares.is_instance(*row)) {
                None => true,
                Some(row) if row == evictor.row => !self.spares_own,
                Some(row) => shares.of(row).excess_bytes() > 0,
            };
            if !goes {
                guarded.push(*block);
            }
            goes
        });
        if victims.len() > wanted {
            victims.select_nth_unstable(wanted);
            victims.truncate(wanted);
        }
        victims.sort_unstable();
        leave_shares(&mut victims, &mut guarded, self.slot_bytes, shares, evictor);
        let newest = victims.last().map_or(0, |block| block.0);
        guarded.retain(|block| block.0 < newest);
        guarded.sort_unstable();
        if let Some(first_left) = guarded.get(GUARDED_MAX).copied() {
            // The next scan finds fewer of them.
            guarded.truncate(GUARDED_MAX);
            victims.retain(|block| block.0 < first_left.0);
        }
        Victims { victims, guarded }
    }
}

/// Of what another instance has, no more goes than it has beyond its share.
fn leave_shares(
    victims: &mut Vec<Stamped>,
    guarded: &mut Vec<Stamped>,
    slot_bytes: u64,
    shares: &Shares,
    evictor: Evictor,
) {
    let mut taken = std::collections::HashMap::new();
    victims.retain(|block| {
        let Some(row) = owner_of(block.0).filter(|row| !evictor.any && *row != evictor.row && shares.is_instance(*row))
        else {
            return true;
        };
        let taken_bytes: &mut u64 = taken.entry(row).or_default();
        let goes = *taken_bytes < shares.of(row).excess_bytes();
        if goes {
            *taken_bytes += slot_bytes
        } else {
            guarded.push(*block)
        }
        goes
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::EVICT_BATCH_MAX;
    use crate::shm::recency::stamp_word;
    use crate::shm::shares::Share;

    const NOBODY: Option<u32> = None;
    const ME: Option<u32> = Some(0);
    const OTHER: Option<u32> = Some(1);
    const DEAD: Option<u32> = Some(2);

    /// Blocks of one byte with ticks 1, 2, ...; slots are numbered like them.
    fn blocks(owners: &[Option<u32>]) -> Vec<Stamped> {
        (1u32..).zip(owners).map(|(tick, owner)| (stamp_word(u64::from(tick), *owner), tick)).collect()
    }

    fn slots(blocks: &[Stamped]) -> Vec<u32> {
        blocks.iter().map(|(_, slot)| *slot).collect()
    }

    /// Slots of victims and guarded blocks, where the shares of both instances are `share` bytes.
    fn chosen(owners: &[Option<u32>], share: u64, wanted: usize, own: bool) -> (Vec<u32>, Vec<u32>) {
        let used = |row| owners.iter().filter(|owner| **owner == row).count() as u64;
        let account = |row| Share { weight_milli: 1000, bytes: share, used_bytes: used(row) };
        let shares = Shares::of_rows(vec![account(ME), account(OTHER)]);
        let evictor = Evictor { row: 0, own, any: false };
        let blocks = blocks(owners);
        let spares_own = spares_own(&blocks, &shares, evictor);
        let chosen = Choice { slot_bytes: 1, shares: &shares, evictor, spares_own, wanted }.of(blocks);
        (slots(&chosen.victims), slots(&chosen.guarded))
    }

    #[test]
    fn the_oldest_go_whoever_they_belong_to_if_nobody_has_too_much() {
        assert_eq!(chosen(&[ME, NOBODY, DEAD, ME, ME], 10, 3, false), (vec![1, 2, 3], vec![]));
    }

    #[test]
    fn others_lose_what_they_have_beyond_their_share_and_no_more() {
        let owners = [OTHER, OTHER, OTHER, ME, OTHER, NOBODY];
        assert_eq!(chosen(&owners, 3, 10, false), (vec![1, 6], vec![2, 3, 4, 5]));
        assert_eq!(chosen(&owners, 4, 10, false), (vec![4, 6], vec![1, 2, 3, 5]));
        assert_eq!(chosen(&owners, 4, 1, false), (vec![4], vec![1, 2, 3]), "guarded is what is older than a victim");
    }

    #[test]
    fn an_evictor_below_its_share_loses_its_own_only_if_nothing_else_went() {
        let owners = [ME, OTHER, OTHER, ME];
        assert_eq!(chosen(&owners, 1, 10, false), (vec![1, 2, 4], vec![3]), "it has too much itself");
        assert_eq!(chosen(&[ME, OTHER, OTHER, OTHER], 2, 10, false), (vec![2], vec![1]));
        assert_eq!(chosen(&[ME, OTHER, OTHER, OTHER], 2, 10, true), (vec![1, 2], vec![]));
    }

    #[test]
    fn more_guarded_blocks_than_one_scan_refreshes_leave_only_older_victims() {
        let mut owners = vec![NOBODY];
        owners.resize(1 + GUARDED_MAX + 5, OTHER);
        owners.push(NOBODY);
        let (victims, guarded) = chosen(&owners, u64::MAX, EVICT_BATCH_MAX, false);
        assert_eq!((victims, guarded.len()), (vec![1], GUARDED_MAX));
        assert_eq!(guarded[0], 2, "oldest first");
    }
}
