//! What was stored of late: two Bloom filters that take turns. The younger one is written until it has taken the hashes
//! that it was made for; then the older one is cleared and written. So at least the last `seen` hashes are remembered,
//! and at most twice as many. Each block leaves two: one with its namespace and epoch, one without.
//!
//! A filter has 16 bits a hash, and a hash six bits in one line of 512: what was never stored is taken for stored about
//! once in 600 times, while a filter is full.

use super::file::Traffic;
use super::rows::Line;
use crate::sync::{AcqRel, Relaxed};

const BITS_PER_HASH: u32 = 6;

impl Traffic {
    fn filter(&self, number: u64) -> &[Line] {
        let lines = self.lines();
        let (even, odd) = lines.split_at(lines.len() / 2);
        if number.is_multiple_of(2) { even } else { odd }
    }

    /// Remember these hashes of a block.
    pub(super) fn remember(&self, hashes: [u64; 2]) {
        let header = self.header();
        let number = header.filter.load(Relaxed);
        let lines = self.filter(number);
        for hash in hashes {
            let line = &lines[line_of(hash, lines.len())];
            for (word, bit) in bits_of(hash) {
                line.words[word].fetch_or(bit, Relaxed);
            }
        }
        let filled = header.filter_filled.fetch_add(hashes.len() as u64, Relaxed);
        if filled >= self.seen {
            self.turn(number);
        }
    }

    /// The filter of that number is full. Who dies at clearing the other leaves some of its bits for another turn.
    #[cold]
    fn turn(&self, number: u64) {
        let header = self.header();
        // Before the turn: who comes behind it must not find the next one full at once.
        header.filter_filled.store(0, Relaxed);
        if header.filter.compare_exchange(number, number.wrapping_add(1), AcqRel, Relaxed).is_err() {
            return;
        }
        let lines = self.filter(number.wrapping_add(1));
        lines.iter().flat_map(|line| &line.words).for_each(|word| word.store(0, Relaxed));
    }

    /// Whether the hash is remembered.
    pub(super) fn remembers(&self, hash: u64) -> bool {
        (0..2).any(|number| {
            let lines = self.filter(number);
            let line = &lines[line_of(hash, lines.len())];
            bits_of(hash).all(|(word, bit)| line.words[word].load(Relaxed) & bit != 0)
        })
    }
}

fn line_of(hash: u64, lines: usize) -> usize {
    hash as usize & (lines - 1)
}

/// Words of a line, and a bit in each: nine bits of the hash for each bit, from those that do not choose the line.
fn bits_of(hash: u64) -> impl Iterator<Item = (usize, u64)> {
    let spread = hash.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..BITS_PER_HASH).map(move |bit| {
        let position = spread >> (64 - 9 * (bit + 1)) & 511;
        (position as usize / 64, 1 << (position % 64))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::TRAFFIC_SEEN_MIN;
    use crate::shm::file::Place;
    use crate::traffic::name::mixed;

    fn pair(number: u64) -> [u64; 2] {
        [mixed(2 * number), mixed(2 * number + 1)]
    }

    #[test]
    fn the_last_blocks_are_remembered_and_those_long_gone_are_not() {
        let traffic = Traffic::open_or_create(&Place::Anonymous, 1).unwrap();
        let blocks = TRAFFIC_SEEN_MIN / 2;
        (0..8 * blocks).for_each(|number| traffic.remember(pair(number)));
        assert!((7 * blocks..8 * blocks).all(|number| pair(number).iter().all(|hash| traffic.remembers(*hash))));
        let old = (0..5 * blocks).filter(|number| traffic.remembers(pair(*number)[0])).count();
        assert!(old < 5 * blocks as usize / 100, "{old} of {} that are long gone", 5 * blocks);
    }

    #[test]
    fn what_was_never_stored_is_seldom_taken_for_stored() {
        let traffic = Traffic::open_or_create(&Place::Anonymous, 1).unwrap();
        let blocks = TRAFFIC_SEEN_MIN / 2;
        (0..2 * blocks).for_each(|number| traffic.remember(pair(number)));
        let asked = 200_000;
        let wrong = (0..asked).filter(|number| traffic.remembers(mixed(1 << 40 | *number))).count();
        assert!(wrong < asked as usize / 250, "{wrong} of {asked}");
    }
}
