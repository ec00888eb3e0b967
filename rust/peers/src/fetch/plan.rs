//! Which peer is asked for which keys.

use std::ops::Range;

/// What one peer has and how soon it could give it.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    /// A byte per key: 0 absent, 1 in memory, 2 on SSD; absent behind the end.
    pub(crate) tiers: Vec<u8>,
    /// Until it is done with what it was asked for.
    pub(crate) seconds: f64,
    pub(crate) seconds_per_block: f64,
}

/// Keys that one peer is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Number of the peer's offer.
    pub(crate) source: usize,
    pub(crate) range: Range<usize>,
}

/// Divide `range` into pieces of at most `blocks_max` keys. Each goes to the peer with the longest run from there, what
/// is in memory before what is on SSD; of several to the one that would be done first. `chained`: up to the first key
/// that nobody has; else those are left out.
pub(crate) fn plan(
    offers: &mut [Offer],
    range: Range<usize>,
    chained: bool,
    blocks_max: usize,
    block_bytes: u64,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut at = range.start;
    while at < range.end && block_bytes > 0 {
        let end = range.end.min(at + blocks_max.max(1));
        let better = |one: &(bool, usize, f64), other: &(bool, usize, f64)| {
            (one.0, one.1) > (other.0, other.1) || ((one.0, one.1) == (other.0, other.1) && one.2 < other.2)
        };
        let mut best: Option<(usize, (bool, usize, f64))> = None;
        for (source, offer) in offers.iter().enumerate() {
            let run = run_of(offer, at..end);
            let rank = (offer.tiers.get(at) == Some(&1), run, offer.seconds + offer.seconds_per_block * run as f64);
            if run > 0 && best.as_ref().is_none_or(|(_, known)| better(&rank, known)) {
                best = Some((source, rank));
            }
        }
        let Some((source, (_, run, seconds))) = best else {
            if chained {
                break;
            }
            at += 1;
            continue;
        };
        offers[source].seconds = seconds;
        pieces.push(Piece { source, range: at..at + run });
        at += run;
    }
    pieces
}

/// How many keys from the first on are where that is.
fn run_of(offer: &Offer, range: Range<usize>) -> usize {
    let tiers = offer.tiers.get(range.start..range.end.min(offer.tiers.len())).unwrap_or(&[]);
    let Some(first) = tiers.first().filter(|tier| **tier != 0) else { return 0 };
    tiers.iter().take_while(|tier| *tier == first).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(tiers: &[u8], seconds: f64) -> Offer {
        Offer { tiers: tiers.to_vec(), seconds, seconds_per_block: 0.1 }
    }

    fn planned(offers: &[Offer], range: Range<usize>, chained: bool, blocks_max: usize) -> Vec<(usize, Range<usize>)> {
        let pieces = plan(&mut offers.to_vec(), range, chained, blocks_max, 4096);
        pieces.into_iter().map(|piece| (piece.source, piece.range)).collect()
    }

    #[test]
    fn the_longest_run_is_first_and_another_peer_goes_on_behind_it() {
        let offers = [offer(&[1, 1, 0, 0, 0], 0.0), offer(&[1, 1, 1, 0, 0], 9.0), offer(&[0, 0, 0, 1, 1], 0.0)];
        assert_eq!(planned(&offers, 0..5, true, 100), [(1, 0..3), (2, 3..5)]);
    }

    #[test]
    fn peers_that_have_the_same_share_the_work() {
        let offers = [offer(&[1; 8], 0.0), offer(&[1; 8], 0.05)];
        assert_eq!(planned(&offers, 0..8, true, 2), [(0, 0..2), (1, 2..4), (0, 4..6), (1, 6..8)]);
    }

    #[test]
    fn memory_comes_before_ssd_and_the_two_are_not_mixed() {
        let offers = [offer(&[2; 4], 0.0), offer(&[1, 1, 2, 2], 5.0)];
        assert_eq!(planned(&offers, 0..4, true, 100), [(1, 0..2), (0, 2..4)]);
    }

    #[test]
    fn a_chain_ends_at_a_key_that_nobody_has() {
        let offers = [offer(&[1, 1, 0, 1], 0.0)];
        assert_eq!(planned(&offers, 0..9, true, 100), [(0, 0..2)]);
        assert_eq!(planned(&offers, 0..9, false, 100), [(0, 0..2), (0, 3..4)]);
        assert_eq!(planned(&offers, 2..4, true, 100), []);
        assert_eq!(planned(&[], 0..4, true, 100), []);
    }
}
