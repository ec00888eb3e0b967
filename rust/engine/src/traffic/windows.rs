//! What a cache without bounds would find: everything but what is asked for the first time. How many blocks that were
//! is estimated by HyperLogLog over those that were missed, and how many were asked for is counted, in spans of time
//! that make up the windows.

use super::file::Traffic;
use super::rows::Span;
use crate::limits::TRAFFIC_REGISTERS;
use crate::sync::{AcqRel, Acquire, Relaxed, Release};

/// Seconds of a window, and of one of its spans.
pub(super) const WINDOWS: [(u64, u64); 3] = [(300, 60), (3600, 150), (86_400, 3600)];
/// Spans of all windows; each has one more than fit, since the youngest is not over.
pub(super) const SPANS: usize = first_span(WINDOWS.len());
const REGISTER_BITS: u32 = TRAFFIC_REGISTERS.trailing_zeros();
/// Highest value of a register.
const RANK_MAX: u32 = 64 - REGISTER_BITS + 1;

const fn spans_of(window: usize) -> usize {
    (WINDOWS[window].0 / WINDOWS[window].1) as usize + 1
}

const fn first_span(window: usize) -> usize {
    let (mut first, mut number) = (0, 0);
    while number < window {
        first += spans_of(number);
        number += 1;
    }
    first
}

/// One window as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its length.
    pub seconds: u64,
    /// Blocks that were asked for.
    pub asked: u64,
    /// About how many distinct ones were missed.
    pub distinct: u64,
}

impl Window {
    /// Millionths of the blocks that a cache without bounds would have found; `None` if none was asked for.
    pub fn hit_ppm(&self) -> Option<u64> {
        let found = u128::from(self.asked.saturating_sub(self.distinct));
        (self.asked > 0).then(|| (found * 1_000_000 / u128::from(self.asked)) as u64)
    }
}

impl Traffic {
    fn spans_in(&self, window: usize) -> &[Span] {
        &self.spans()[first_span(window)..first_span(window) + spans_of(window)]
    }

    /// At `seconds` of the boot clock so many blocks were asked for, and those of these hashes were missed.
    pub(super) fn note_in_windows(&self, seconds: u64, asked: u64, missed: impl Iterator<Item = u64>) {
        let ready: [Option<&Span>; WINDOWS.len()] = std::array::from_fn(|window| {
            let number = seconds / WINDOWS[window].1;
            let spans = self.spans_in(window);
            let span = &spans[number as usize % spans.len()];
            prepare(span, number).then_some(span)
        });
        ready.iter().flatten().for_each(|span| {
            span.asked.fetch_add(asked, Relaxed);
        });
        for rank in missed.map(Rank::of) {
            ready.iter().flatten().for_each(|span| rank.raise(span));
        }
    }

    /// All windows as they are at `seconds` of the boot clock.
    pub(super) fn windows(&self, seconds: u64) -> [Window; WINDOWS.len()] {
        std::array::from_fn(|window| {
            let (length, span_seconds) = WINDOWS[window];
            let (now, mut asked, mut registers) = (seconds / span_seconds, 0u64, vec![0u8; TRAFFIC_REGISTERS]);
            for span in self.spans_in(window) {
                let state = span.state.load(Acquire);
                let age = (state >> 1).checked_sub(1).and_then(|number| now.checked_sub(number));
                if state % 2 == 1 || age.is_none_or(|age| age >= spans_of(window) as u64) {
                    continue;
                }
                asked = asked.saturating_add(span.asked.load(Relaxed));
                for (eight, word) in registers.chunks_exact_mut(8).zip(&span.registers) {
                    let bytes = word.load(Relaxed).to_le_bytes();
                    eight.iter_mut().zip(bytes).for_each(|(most, rank)| *most = rank.max(*most));
                }
            }
            Window { seconds: length, asked, distinct: (estimate(&registers) as u64).min(asked) }
        })
    }
}

/// Have the span count for `number`; false while somebody else clears it. Who dies at that leaves it out until its next
/// turn.
fn prepare(span: &Span, number: u64) -> bool {
    let state = span.state.load(Acquire);
    let mine = number.wrapping_add(1) << 1;
    if state == mine {
        return true;
    }
    // One that is ahead would be of a clock that was set back, which this one is not: it is damaged.
    if state == mine | 1 || span.state.compare_exchange(state, mine | 1, AcqRel, Relaxed).is_err() {
        return false;
    }
    span.asked.store(0, Relaxed);
    span.registers.iter().for_each(|word| word.store(0, Relaxed));
    span.state.compare_exchange(mine | 1, mine, Release, Relaxed).is_ok()
}

/// What a hash does to registers: to which, and how high.
struct Rank {
    word: usize,
    shift: u32,
    rank: u64,
}

impl Rank {
    fn of(hash: u64) -> Self {
        let register = hash >> (64 - REGISTER_BITS);
        let rank = ((hash << REGISTER_BITS) | 1 << (REGISTER_BITS - 1)).leading_zeros() + 1;
        Self { word: register as usize / 8, shift: 8 * (register as u32 % 8), rank: u64::from(rank) }
    }

    fn raise(&self, span: &Span) {
        let word = &span.registers[self.word];
        let mut before = word.load(Relaxed);
        while before >> self.shift & 0xFF < self.rank {
            let after = before & !(0xFF << self.shift) | self.rank << self.shift;
            match word.compare_exchange_weak(before, after, Relaxed, Relaxed) {
                Ok(_) => return,
                Err(changed) => before = changed,
            }
        }
    }
}

/// Distinct hashes that registers stand for, by the estimator of Ertl (2017), which needs no corrections for few or
/// many.
fn estimate(registers: &[u8]) -> f64 {
    let mut counts = [0u32; RANK_MAX as usize + 1];
    for rank in registers {
        counts[usize::from(*rank).min(RANK_MAX as usize)] += 1;
    }
    let size = registers.len() as f64;
    let mut sum = size * tau(1.0 - f64::from(counts[RANK_MAX as usize]) / size);
    for count in counts[1..RANK_MAX as usize].iter().rev() {
        sum = 0.5 * (sum + f64::from(*count));
    }
    sum += size * sigma(f64::from(counts[0]) / size);
    size * size / (2.0 * std::f64::consts::LN_2 * sum)
}

fn sigma(part: f64) -> f64 {
    if part >= 1.0 {
        return f64::INFINITY;
    }
    let (mut power, mut weight, mut sum) = (part, 1.0, part);
    loop {
        power *= power;
        let before = sum;
        sum += power * weight;
        weight += weight;
        if sum <= before {
            return sum;
        }
    }
}

fn tau(part: f64) -> f64 {
    if part <= 0.0 || part >= 1.0 {
        return 0.0;
    }
    let (mut root, mut weight, mut sum) = (part, 1.0, 1.0 - part);
    loop {
        root = root.sqrt();
        let before = sum;
        weight *= 0.5;
        sum -= (1.0 - root).powi(2) * weight;
        if sum >= before {
            return sum / 3.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::file::Place;
    use crate::traffic::name::mixed;

    fn traffic() -> Traffic {
        Traffic::open_or_create(&Place::Anonymous, 1).unwrap()
    }

    #[test]
    fn distinct_blocks_are_counted_to_a_few_percent_however_many() {
        for count in [0u64, 1, 10, 1_000, 20_000, 300_000] {
            let traffic = traffic();
            traffic.note_in_windows(1_000_000, 3 * count, (0..2 * count).map(|number| mixed(number % count)));
            for window in traffic.windows(1_000_000) {
                let off = window.distinct.abs_diff(count) as f64;
                assert!(off <= 0.05 * count as f64, "{window:?} of {count}");
                assert_eq!(window.asked, 3 * count);
            }
        }
    }

    #[test]
    fn what_is_older_than_a_window_does_not_count_in_it() {
        let traffic = traffic();
        let noon = 43_200 + 10 * 86_400;
        traffic.note_in_windows(noon, 100, (0..100).map(mixed));
        let asked = |seconds| traffic.windows(seconds).map(|window| window.asked);
        assert_eq!(asked(noon + 240), [100, 100, 100]);
        assert_eq!(asked(noon + 600), [0, 100, 100]);
        assert_eq!(asked(noon + 4_000), [0, 0, 100]);
        assert_eq!(asked(noon + 100_000), [0, 0, 0]);
        // A span that is used again starts from nothing.
        traffic.note_in_windows(noon + 6 * 60, 7, (0..7).map(mixed));
        let [five_minutes, ..] = traffic.windows(noon + 6 * 60);
        assert_eq!((five_minutes.asked, five_minutes.distinct), (7, 7));
    }

    #[test]
    fn a_span_whose_clearing_was_cut_short_is_left_out_until_its_next_turn() {
        let traffic = traffic();
        traffic.spans_in(0)[0].state.store((600 / 60 + 2 + 1) << 1 | 1, Relaxed);
        traffic.note_in_windows(720, 5, (0..5).map(mixed));
        assert_eq!(traffic.windows(720)[0].asked, 0);
        traffic.note_in_windows(720 + 360, 5, (0..5).map(mixed));
        assert_eq!(traffic.windows(720 + 360)[0].asked, 5);
    }
}
