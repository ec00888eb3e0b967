//! Eviction policies. All obey the rule of `recency.rs`, that the lowest time goes and a block's is below that of the
//! block before it; what they choose is where a new block starts. A use gives a chain the newest times under each.
//!
//! A choice concerns the blocks that a process publishes itself, so processes of one pool may choose differently.

mod lru;
mod probation;

use crate::error::{Error, Result};

/// What is known when a new block starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    /// Highest time that was on a list of what goes.
    pub(crate) oldest: u64,
    pub(crate) now: u64,
    /// Its name is among those of blocks that went not long ago.
    pub(crate) returns: bool,
}

/// One rule for where a new block starts.
pub(crate) trait Policy: Sync {
    fn name(&self) -> &'static str;

    /// Time of a new block if nothing is before it; from `oldest` to `now`.
    fn time(&self, start: Start) -> u64;
}

/// All of them, the default one first.
static POLICIES: [&dyn Policy; 2] = [&probation::Probation, &lru::Lru];

fn policy_names() -> Vec<&'static str> {
    POLICIES.iter().map(|policy| policy.name()).collect()
}

/// Number of the policy `name`.
pub(crate) fn policy_number(name: &str) -> Result<u32> {
    let number = POLICIES.iter().position(|policy| policy.name() == name);
    number.map(|number| number as u32).ok_or_else(|| {
        Error::invalid(format!("'{name}' is no eviction policy: use one of {}", policy_names().join(", ")))
    })
}

/// The policy of this number; the default one for numbers that there are not.
pub(crate) fn policy(number: u32) -> &'static dyn Policy {
    POLICIES.get(number as usize).copied().unwrap_or(POLICIES[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_block_starts_between_the_oldest_time_and_now_under_each_policy() {
        let times = [0, 1, 2, 3, 100, 1 << 40, u64::MAX >> 8];
        for (oldest, now) in times.iter().flat_map(|oldest| times.iter().map(move |now| (*oldest, *now))) {
            for (policy, returns) in POLICIES.iter().flat_map(|policy| [(policy, false), (policy, true)]) {
                let time = policy.time(Start { oldest, now, returns });
                assert!(time >= oldest.min(now) && time <= now, "{} from {oldest} to {now}: {time}", policy.name());
                assert!(!returns || time == now, "what comes back has shown that it is used again");
            }
        }
    }

    #[test]
    fn a_policy_is_found_by_its_name_and_by_no_other() {
        for name in policy_names() {
            assert_eq!(policy(policy_number(name).expect("a name of ours")).name(), name);
        }
        let error = policy_number("LRU").expect_err("names are exact").to_string();
        assert!(error.contains("probation, lru"), "{error}");
    }
}
