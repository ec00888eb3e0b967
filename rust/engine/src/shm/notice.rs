//! A word that says that there may be something to look after, which whoever has the time does.
//!
//! Bit 0: there may be. Above: how often that was said. Who has looked and found nothing takes back what he had read
//! before he looked, and nothing that was said since: the count never repeats, so nobody mistakes a new notice for the
//! old one.

use crate::sync::{AtomicU64, Relaxed, SeqCst};

const RAISED: u64 = 1;
const ONCE_MORE: u64 = 2;

/// Say that there may be something.
pub(crate) fn raise(word: &AtomicU64) {
    // Counted first: who takes back what was before does not take this back.
    word.fetch_add(ONCE_MORE, SeqCst);
    word.fetch_or(RAISED, SeqCst);
}

/// What there is to take back, if there may be something.
pub(crate) fn read(word: &AtomicU64) -> Option<u64> {
    Some(word.load(SeqCst)).filter(|word| word & RAISED != 0)
}

/// Nothing is left of what had been said when `seen` was read.
pub(crate) fn take_back(word: &AtomicU64, seen: u64) {
    let _raised_again = word.compare_exchange(seen, seen & !RAISED, SeqCst, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looked_before_others_had_settled_it_does_not_settle_what_was_said_afterwards() {
        let word = AtomicU64::new(0);
        assert_eq!(read(&word), None);
        raise(&word);
        let (slow, fast) = (read(&word).unwrap(), read(&word).unwrap());
        take_back(&word, fast);
        assert_eq!(read(&word), None);
        raise(&word);
        take_back(&word, slow);
        assert!(read(&word).is_some(), "said after the slow one had looked");
    }
}
