//! Counters that have a name and a place in a row of shared memory, and only rise.

/// `counters! { of Row; /// What it counts. Name = "label", ... }`: an enum `Counter` of the names, their labels in
/// `NAMES`, and what a `Row` with a field `counters` does with them.
macro_rules! counters {
    (of $row:ident; $($(#[doc = $doc:literal])* $name:ident = $label:literal,)*) => {
        /// One counter; the number is its place in the row.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Counter {
            $($(#[doc = $doc])* $name,)*
        }

        /// Names of the counters, in the order of their places.
        pub(crate) const NAMES: &[&str] = &[$($label,)*];

        const _: () = assert!(NAMES.len() <= COUNTERS);

        impl $row {
            /// Count.
            pub(crate) fn add(&self, counter: Counter, count: u64) {
                if count > 0 {
                    self.counters[counter as usize].fetch_add(count, $crate::sync::Relaxed);
                }
            }

            /// Names and values.
            pub(crate) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
                let values = self.counters.iter().map(|word| word.load($crate::sync::Relaxed));
                NAMES.iter().copied().zip(values)
            }
        }
    };
}

pub(crate) use counters;
