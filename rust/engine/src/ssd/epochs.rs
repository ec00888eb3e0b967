//! Epochs of namespaces: raised to forget what was stored under the same fingerprint. Section 6 of
//! `docs/ssd-format.md`.

use std::collections::BTreeMap;

use crate::limits::SSD_EPOCHS_MAX;

/// 256 bits that name everything which changes bytes.
pub type Fingerprint = [u8; 32];

/// The epoch of every namespace; all that are not listed are at the base.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epochs {
    base: u64,
    raised: BTreeMap<Fingerprint, u64>,
}

impl Epochs {
    pub(crate) fn new(base: u64, raised: impl Iterator<Item = (Fingerprint, u64)>) -> Self {
        Self { base, raised: raised.collect() }
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Those above the base.
    pub(crate) fn raised(&self) -> impl Iterator<Item = (&Fingerprint, u64)> {
        self.raised.iter().map(|(fingerprint, epoch)| (fingerprint, *epoch))
    }

    /// The epoch of one namespace.
    pub(crate) fn of(&self, fingerprint: &Fingerprint) -> u64 {
        self.raised.get(fingerprint).copied().unwrap_or(0).max(self.base)
    }

    /// Forget one namespace; all of them if the table is full.
    pub(crate) fn raise(&mut self, fingerprint: &Fingerprint) {
        let epoch = self.of(fingerprint) + 1;
        if !self.raised.contains_key(fingerprint) && self.raised.len() >= SSD_EPOCHS_MAX {
            self.base = self.raised.values().copied().fold(epoch, u64::max) + 1;
            self.raised.clear();
            return;
        }
        self.raised.insert(*fingerprint, epoch);
    }

    /// The later of both, namespace by namespace.
    pub(crate) fn join(&mut self, other: &Self) {
        self.base = self.base.max(other.base);
        for (fingerprint, epoch) in &other.raised {
            let mine = self.of(fingerprint);
            if *epoch > mine {
                self.raised.insert(*fingerprint, *epoch);
            }
        }
        let base = self.base;
        self.raised.retain(|_, epoch| *epoch > base);
        if self.raised.len() > SSD_EPOCHS_MAX {
            self.base = self.raised.values().copied().fold(base, u64::max) + 1;
            self.raised.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(number: usize) -> Fingerprint {
        let mut fingerprint = [0; 32];
        fingerprint[..8].copy_from_slice(&number.to_le_bytes());
        fingerprint
    }

    #[test]
    fn epochs_only_rise_even_when_the_table_overflows() {
        let mut epochs = Epochs::default();
        let mut before = vec![0; 3 * SSD_EPOCHS_MAX];
        for round in 0..4 * SSD_EPOCHS_MAX {
            let raised = round % before.len();
            epochs.raise(&fingerprint(raised));
            for (number, before) in before.iter_mut().enumerate() {
                let now = epochs.of(&fingerprint(number));
                assert!(now >= *before && (number != raised || now > *before));
                *before = now;
            }
            assert!(epochs.raised().count() <= SSD_EPOCHS_MAX);
        }
        assert!(epochs.base() > 0);
    }

    #[test]
    fn joined_epochs_are_at_least_each_of_both() {
        let (mut left, mut right) = (Epochs::default(), Epochs::default());
        (0..SSD_EPOCHS_MAX).for_each(|number| left.raise(&fingerprint(number)));
        (0..2 * SSD_EPOCHS_MAX).step_by(3).for_each(|number| right.raise(&fingerprint(number)));
        let mut both = left.clone();
        both.join(&right);
        for number in 0..2 * SSD_EPOCHS_MAX {
            let name = fingerprint(number);
            assert!(both.of(&name) >= left.of(&name).max(right.of(&name)));
        }
        assert!(both.raised().count() <= SSD_EPOCHS_MAX);
    }
}
