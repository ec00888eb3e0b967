//! Blocks that are leased to peers: by whom, until when, and who is sending from them just now.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pegaflow_engine::{Lent, Result};

use super::counters::Counters;
use crate::limits::{LEASES_MAX, SESSION_LEASES_MAX};
use crate::random;
use crate::sync::{AtomicU64, Relaxed, lock};
use crate::transport::{LeasedParts, Sending, Ticket};

/// Name of a client's session.
pub(crate) type SessionId = [u8; 16];
/// What to do when a lease ends.
type AtEnd = Box<dyn FnOnce() + Send>;

/// Bytes that are set aside for a lease.
pub(crate) struct Claim {
    bytes: u64,
    total: Arc<AtomicU64>,
}

impl Claim {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Give back what is not needed.
    fn shrink(&mut self, bytes: u64) {
        self.total.fetch_sub(self.bytes.saturating_sub(bytes), Relaxed);
        self.bytes = self.bytes.min(bytes);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Relaxed);
    }
}

/// Blocks of one lease; given back when nobody sends from them and the lease has ended.
struct Body {
    blocks: Vec<Lent>,
    _claim: Claim,
}

struct Lease {
    secret: [u8; 16],
    session: SessionId,
    ends: Instant,
    body: Arc<Body>,
    senders: HashMap<u64, AtEnd>,
}

#[derive(Default)]
struct State {
    leases: HashMap<u64, Lease>,
    of_session: HashMap<SessionId, usize>,
    last_sender: u64,
}

impl State {
    fn remove(&mut self, number: u64) -> Option<Lease> {
        let lease = self.leases.remove(&number)?;
        if let Some(count) = self.of_session.get_mut(&lease.session) {
            *count -= 1;
            if *count == 0 {
                self.of_session.remove(&lease.session);
            }
        }
        Some(lease)
    }
}

/// All leases of a server.
pub(crate) struct Leases {
    state: Arc<Mutex<State>>,
    total: Arc<AtomicU64>,
    bytes_max: u64,
    time: Duration,
    counters: Arc<Counters>,
}

/// What is given to a client.
pub(crate) struct Given {
    pub(crate) number: u64,
    pub(crate) secret: [u8; 16],
}

impl Leases {
    /// At most so many bytes, each lease for so long.
    pub(crate) fn new(bytes_max: u64, time: Duration, counters: Arc<Counters>) -> Self {
        Self { state: Arc::default(), total: Arc::default(), bytes_max, time, counters }
    }

    /// Leases that have not ended.
    pub(crate) fn count(&self) -> usize {
        lock(&self.state).leases.len()
    }

    /// Bytes of blocks that are not given back.
    pub(crate) fn bytes(&self) -> u64 {
        self.total.load(Relaxed)
    }

    /// Set up to `bytes` aside; fewer if there is less room, and none if there are too many leases.
    pub(crate) fn claim(&self, session: SessionId, bytes: u64) -> Claim {
        let state = lock(&self.state);
        let own = state.of_session.get(&session).copied().unwrap_or(0);
        let full = state.leases.len() >= LEASES_MAX || own >= SESSION_LEASES_MAX;
        let room = if full { 0 } else { self.bytes_max.saturating_sub(self.total.load(Relaxed)) };
        let bytes = bytes.min(room);
        self.total.fetch_add(bytes, Relaxed);
        Claim { bytes, total: Arc::clone(&self.total) }
    }

    /// Lease blocks to a client.
    pub(crate) fn give(&self, session: SessionId, blocks: Vec<Lent>, mut claim: Claim) -> Result<Given> {
        claim.shrink(blocks.iter().map(Lent::bytes_all).sum());
        let (number, secret) = (random::number()?, random::bytes()?);
        self.counters.leases_given.add(1);
        self.counters.blocks_leased.add(blocks.len() as u64);
        let body = Arc::new(Body { blocks, _claim: claim });
        let ends = Instant::now() + self.time;
        let lease = Lease { secret, session, ends, body, senders: HashMap::new() };
        let mut state = lock(&self.state);
        *state.of_session.entry(session).or_default() += 1;
        let replaced = state.leases.insert(number, lease);
        drop(state);
        debug_assert!(replaced.is_none(), "64 random bits");
        Ok(Given { number, secret })
    }

    /// Give a lease back. Whether it was held until now.
    pub(crate) fn release(&self, session: SessionId, number: u64) -> bool {
        let mut state = lock(&self.state);
        if state.leases.get(&number).is_none_or(|lease| lease.session != session) {
            return false;
        }
        let lease = state.remove(number);
        drop(state);
        let in_time = |lease: &Lease| lease.ends > Instant::now() && lease.body.blocks.iter().all(Lent::is_held);
        let held = lease.as_ref().is_some_and(in_time);
        lease.into_iter().for_each(end);
        held
    }

    /// End what has lasted too long.
    pub(crate) fn expire(&self) {
        let now = Instant::now();
        self.counters.leases_expired.add(self.end_where(|lease| lease.ends <= now));
    }

    /// End all leases of a client that is gone.
    pub(crate) fn end_session(&self, session: SessionId) {
        self.counters.leases_expired.add(self.end_where(|lease| lease.session == session));
    }

    /// End all.
    pub(crate) fn end_all(&self) {
        self.end_where(|_| true);
    }

    fn end_where(&self, ended: impl Fn(&Lease) -> bool) -> u64 {
        let mut state = lock(&self.state);
        let numbers: Vec<u64> =
            state.leases.iter().filter(|(_, lease)| ended(lease)).map(|(number, _)| *number).collect();
        let leases: Vec<Lease> = numbers.into_iter().filter_map(|number| state.remove(number)).collect();
        drop(state);
        let count = leases.len() as u64;
        leases.into_iter().for_each(end);
        count
    }
}

/// Tell who sends. Outside of the lock: blocks are given back here if nobody does.
fn end(lease: Lease) {
    lease.senders.into_values().for_each(|at_end| at_end());
}

impl LeasedParts for Leases {
    fn begin(&self, ticket: &Ticket, end: AtEnd) -> Option<Box<dyn Sending>> {
        let mut state = lock(&self.state);
        state.last_sender += 1;
        let sender = state.last_sender;
        let lease = state.leases.get_mut(&ticket.lease)?;
        let differing = lease.secret.iter().zip(ticket.secret).fold(0, |all, (known, shown)| all | (known ^ shown));
        if std::hint::black_box(differing) != 0 || lease.ends <= Instant::now() {
            return None;
        }
        lease.senders.insert(sender, end);
        let (body, lease, state) = (Arc::clone(&lease.body), ticket.lease, Arc::clone(&self.state));
        Some(Box::new(Sender { body, lease, sender, state }))
    }
}

struct Sender {
    body: Arc<Body>,
    lease: u64,
    sender: u64,
    state: Arc<Mutex<State>>,
}

impl Sending for Sender {
    fn part(&self, index: u32, part: u32) -> Option<&[u8]> {
        self.body.blocks.get(index as usize)?.bytes(part)
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let at_end = lock(&self.state).leases.get_mut(&self.lease).and_then(|lease| lease.senders.remove(&self.sender));
        drop(at_end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::AtomicUsize;

    const US: SessionId = [1; 16];

    fn leases(time: Duration) -> Leases {
        Leases::new(1 << 20, time, Arc::default())
    }

    fn give(leases: &Leases, session: SessionId) -> Ticket {
        let given = leases.give(session, Vec::new(), leases.claim(session, 100)).unwrap();
        Ticket { lease: given.number, secret: given.secret }
    }

    #[test]
    fn a_lease_is_opened_by_its_secret_until_it_is_given_back() {
        let leases = leases(Duration::from_secs(3600));
        let ticket = give(&leases, US);
        assert!(leases.begin(&ticket, Box::new(|| {})).is_some());
        let mut wrong = ticket;
        wrong.secret[15] ^= 1;
        assert!(leases.begin(&wrong, Box::new(|| {})).is_none());
        assert!(leases.begin(&Ticket { lease: ticket.lease ^ 1, ..ticket }, Box::new(|| {})).is_none());
        assert!(!leases.release([2; 16], ticket.lease), "another client's");
        assert!(leases.release(US, ticket.lease));
        assert!(!leases.release(US, ticket.lease), "only once");
        assert!(leases.begin(&ticket, Box::new(|| {})).is_none());
    }

    #[test]
    fn who_sends_when_a_lease_ends_is_told_once() {
        for ends in [Leases::end_all, |leases: &Leases| leases.end_session(US), Leases::expire] {
            let leases = leases(Duration::ZERO);
            let told = Arc::new(AtomicUsize::new(0));
            // As if it had begun before the lease was over.
            let ticket = give(&leases, US);
            let teller = Arc::clone(&told);
            let at_end = Box::new(move || {
                teller.fetch_add(1, Relaxed);
            });
            lock(&leases.state).leases.get_mut(&ticket.lease).unwrap().senders.insert(7, at_end);
            ends(&leases);
            ends(&leases);
            assert_eq!((told.load(Relaxed), leases.count()), (1, 0));
            assert!(!leases.release(US, ticket.lease), "it was not held until then");
        }
    }

    #[test]
    fn a_lease_that_is_over_is_not_sent_from_and_not_held() {
        let leases = leases(Duration::ZERO);
        let ticket = give(&leases, US);
        assert!(leases.begin(&ticket, Box::new(|| {})).is_none());
        assert!(!leases.release(US, ticket.lease));
    }

    #[test]
    fn nobody_has_more_leases_or_bytes_than_there_is_room_for() {
        let leases = leases(Duration::from_secs(3600));
        let most = leases.claim(US, u64::MAX);
        assert_eq!((most.bytes(), leases.claim(US, 1).bytes()), (1 << 20, 0));
        drop(most);
        assert_eq!(leases.bytes(), 0);
        let tickets: Vec<Ticket> = (0..SESSION_LEASES_MAX).map(|_| give(&leases, US)).collect();
        assert_eq!(leases.claim(US, 1).bytes(), 0);
        assert_eq!(leases.claim([2; 16], 1).bytes(), 1, "others have their own");
        assert!(leases.release(US, tickets[0].lease));
        assert_eq!(leases.claim(US, 1).bytes(), 1);
        assert_eq!(leases.bytes(), 0, "what is leased has no blocks here");
    }
}
