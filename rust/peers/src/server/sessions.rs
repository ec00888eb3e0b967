//! Clients that have greeted, and when they were heard of last.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use super::leases::SessionId;
use super::mark::Mark;
use crate::limits::{SESSION_SILENCE_MAX, SESSIONS_MAX};
use crate::sync::lock;

struct Session {
    heard: Instant,
    /// By which it was heard of last.
    connection: Weak<Mark>,
}

/// Sessions of one term.
#[derive(Default)]
pub(crate) struct Sessions {
    known: Mutex<HashMap<SessionId, Session>>,
}

impl Sessions {
    /// A client greets. `None` if there are too many; `Some(true)` if it was not known.
    pub(crate) fn greet(&self, id: SessionId, connection: &Arc<Mark>) -> Option<bool> {
        let mut known = lock(&self.known);
        let is_new = !known.contains_key(&id);
        if is_new && known.len() >= SESSIONS_MAX {
            return None;
        }
        known.insert(id, Session { heard: Instant::now(), connection: Arc::downgrade(connection) });
        Some(is_new)
    }

    /// A client calls. `false` if it has not greeted, or is taken for gone.
    pub(crate) fn hear(&self, id: SessionId, connection: &Arc<Mark>) -> bool {
        let mut known = lock(&self.known);
        let Some(session) = known.get_mut(&id) else { return false };
        *session = Session { heard: Instant::now(), connection: Arc::downgrade(connection) };
        true
    }

    /// Whether a client has greeted and is not taken for gone.
    pub(crate) fn knows(&self, id: SessionId) -> bool {
        lock(&self.known).contains_key(&id)
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.known).len()
    }

    /// Forget clients that are silent or whose connection is gone.
    pub(crate) fn take_gone(&self) -> Vec<SessionId> {
        let now = Instant::now();
        let is_gone = |session: &Session| {
            session.connection.strong_count() == 0 || now.duration_since(session.heard) > SESSION_SILENCE_MAX
        };
        let mut known = lock(&self.known);
        let gone: Vec<SessionId> = known.iter().filter(|(_, session)| is_gone(session)).map(|(id, _)| *id).collect();
        gone.iter().for_each(|id| drop(known.remove(id)));
        gone
    }

    /// Forget all.
    pub(crate) fn take_all(&self) -> Vec<SessionId> {
        lock(&self.known).drain().map(|(id, _)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    fn mark() -> Arc<Mark> {
        Arc::new(Mark::new(&Arc::new(Semaphore::new(1))))
    }

    #[test]
    fn a_client_is_gone_with_its_last_connection() {
        let (sessions, first, second) = (Sessions::default(), mark(), mark());
        assert!(!sessions.hear([1; 16], &first), "it has not greeted");
        assert_eq!(sessions.greet([1; 16], &first), Some(true));
        assert_eq!(sessions.greet([1; 16], &first), Some(false));
        assert!(sessions.hear([1; 16], &second));
        drop(first);
        assert!(sessions.take_gone().is_empty());
        drop(second);
        assert!(sessions.knows([1; 16]));
        assert_eq!(sessions.take_gone(), [[1; 16]]);
        assert!(!sessions.knows([1; 16]));
        assert_eq!(sessions.count(), 0);
    }

    #[test]
    fn there_is_room_for_so_many_clients_and_no_more() {
        let (sessions, mark) = (Sessions::default(), mark());
        for number in 0..SESSIONS_MAX as u128 {
            assert_eq!(sessions.greet(number.to_le_bytes(), &mark), Some(true));
        }
        assert_eq!(sessions.greet([255; 16], &mark), None);
        assert_eq!(sessions.greet([0; 16], &mark), Some(false), "who is known is heard");
        assert_eq!(sessions.take_all().len(), SESSIONS_MAX);
    }
}
