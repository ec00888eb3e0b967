//! The server's ends of queue pairs, by the sessions of clients.

use std::collections::{BTreeMap, VecDeque};

use pegaflow_engine::{Error, ErrorKind, Result};

use crate::limits::{RDMA_PAIRS_MAX, RDMA_SESSION_PAIRS_MAX};

/// Number of the server's port, and number of the queue pair there.
pub(super) type PairName = (u32, u32);

/// What is taken out is to be dropped outside of any lock: destroying it takes a while.
pub(super) struct Answering<P> {
    sessions: BTreeMap<[u8; 16], VecDeque<(PairName, P)>>,
}

impl<P> Default for Answering<P> {
    fn default() -> Self {
        Self { sessions: BTreeMap::new() }
    }
}

impl<P> Answering<P> {
    pub(super) fn count(&self) -> usize {
        self.sessions.values().map(VecDeque::len).sum()
    }

    /// Take those of a session that its client has given up. Names of others mean nothing.
    pub(super) fn give_up(&mut self, session: [u8; 16], names: &[PairName]) -> Vec<P> {
        let Some(own) = self.sessions.get_mut(&session) else { return Vec::new() };
        let (gone, kept) = std::mem::take(own).into_iter().partition(|(name, _)| names.contains(name));
        *own = kept;
        if own.is_empty() {
            self.sessions.remove(&session);
        }
        let gone: VecDeque<(PairName, P)> = gone;
        gone.into_iter().map(|(_, pair)| pair).collect()
    }

    /// Keep what was made for a session. If it has too many then, its oldest ones are taken.
    pub(super) fn keep(&mut self, session: [u8; 16], made: &mut Vec<(PairName, P)>) -> Result<Vec<P>> {
        let (all, held) = (self.count(), self.sessions.get(&session).map_or(0, VecDeque::len));
        let surplus = (held + made.len()).saturating_sub(RDMA_SESSION_PAIRS_MAX);
        if all + made.len() > RDMA_PAIRS_MAX + surplus {
            return Err(Error::new(ErrorKind::Full, format!("this server has {all} queue pairs already")));
        }
        if made.is_empty() {
            return Ok(Vec::new());
        }
        let own = self.sessions.entry(session).or_default();
        own.extend(made.drain(..));
        Ok(own.drain(..surplus).map(|(_, pair)| pair).collect())
    }

    /// Take all of a session.
    pub(super) fn end(&mut self, session: [u8; 16]) -> Vec<P> {
        self.sessions.remove(&session).into_iter().flatten().map(|(_, pair)| pair).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: [u8; 16] = [1; 16];
    const OTHER: [u8; 16] = [2; 16];

    fn pairs(nics: u32, number: u32) -> Vec<(PairName, u32)> {
        (0..nics).map(|nic| ((nic, number), number)).collect()
    }

    fn names(nics: u32, number: u32) -> Vec<PairName> {
        pairs(nics, number).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn a_client_that_opens_again_and_again_has_two_generations_at_most() {
        let mut all = Answering::default();
        for number in 1..100 {
            assert!(all.keep(US, &mut pairs(2, number)).unwrap().is_empty());
            assert!(all.count() <= 4, "the old one goes once there is a new one");
            all.give_up(US, &names(2, number - 1));
            assert_eq!(all.count(), 2);
        }
        assert!(all.give_up(US, &names(2, 1000)).is_empty(), "there are none of that name");
        assert_eq!(all.give_up(US, &names(2, 99)), [99, 99]);
        assert!(all.sessions.is_empty());
    }

    #[test]
    fn a_client_gives_up_what_is_its_own_and_on_the_port_that_it_names() {
        let mut all = Answering::default();
        for session in [US, OTHER] {
            assert!(all.keep(session, &mut pairs(2, 7)).unwrap().is_empty());
        }
        assert_eq!(all.give_up(US, &[(0, 7), (1, 8), (2, 7)]), [7]);
        assert_eq!(all.count(), 3);
        assert_eq!((all.end(US).len(), all.end(US).len(), all.end(OTHER).len()), (1, 0, 2));
    }

    #[test]
    fn the_oldest_go_where_a_client_gives_none_up_and_a_full_server_makes_no_more() {
        let mut all = Answering::default();
        for number in 0..RDMA_SESSION_PAIRS_MAX as u32 {
            assert!(all.keep(US, &mut pairs(1, number)).unwrap().is_empty());
        }
        assert_eq!(all.keep(US, &mut pairs(1, 1000)).unwrap(), [0]);
        for session in 3..=RDMA_PAIRS_MAX / RDMA_SESSION_PAIRS_MAX + 1 {
            let id = (session as u128).to_le_bytes();
            assert!(all.keep(id, &mut pairs(RDMA_SESSION_PAIRS_MAX as u32, 5)).unwrap().is_empty());
        }
        assert_eq!(all.count(), RDMA_PAIRS_MAX);
        assert!(all.keep(OTHER, &mut pairs(1, 5)).is_err());
        assert_eq!(all.keep(US, &mut pairs(1, 1001)).unwrap(), [1], "in the place of its own");
    }
}
