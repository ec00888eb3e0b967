//! One question to all peers at a time: asked in parallel, with one deadline.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pegaflow_engine::{Error, ErrorKind, Key, Result};

use super::peer::{Peer, Up};
use super::{Inner, Question};
use crate::fetch::{Asked, PeerFetch, Source};
use crate::limits::{CALL_KEYS_MAX, CALL_QUESTIONS_MAX, FIND_TIME_MAX};
use crate::proto;
use crate::sync::{Relaxed, lock};
use crate::wire;

/// Over the deadline of a call, for what is done with its answer.
const ANSWER_MARGIN: Duration = Duration::from_millis(50);

/// What one peer has, per question a byte per key.
struct Answer {
    peer: Arc<Peer>,
    up: Arc<Up>,
    tiers: Vec<Vec<u8>>,
}

struct Answers {
    waiting: usize,
    all: Vec<Answer>,
}

/// Counts a query as open until the last peer has answered.
struct Open(Arc<Inner>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.queries.fetch_sub(1, Relaxed);
    }
}

/// What was asked of the peers, and what they say.
pub struct PeerQuery {
    inner: Arc<Inner>,
    questions: Vec<Arc<Asked>>,
    answers: Arc<Mutex<Answers>>,
    deadline: Instant,
}

impl PeerQuery {
    /// Ask all peers that are there, or those of them that are `among` some addresses; `None` if none is.
    pub(crate) fn ask(inner: &Arc<Inner>, questions: Vec<Question>, among: Option<&[String]>) -> Result<Option<Self>> {
        let keys = questions.iter().map(|question| question.keys.len()).sum::<usize>();
        if questions.len() > CALL_QUESTIONS_MAX || keys > CALL_KEYS_MAX {
            let text = format!(
                "peers are asked for {keys} keys by {} questions at a time: at most {CALL_KEYS_MAX} and \
                 {CALL_QUESTIONS_MAX}",
                questions.len()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let wanted = |peer: &Arc<Peer>| among.is_none_or(|among| among.contains(&peer.address));
        let peers = inner.peers().into_iter().filter(wanted);
        let up: Vec<(Arc<Peer>, Arc<Up>)> = peers.filter_map(|peer| peer.up().map(|up| (peer, up))).collect();
        if up.is_empty() {
            return Ok(None);
        }
        let asked = questions.into_iter().map(|question| asked(inner, question)).collect::<Result<Vec<_>>>()?;
        let message: Arc<Vec<proto::Question>> = Arc::new(asked.iter().map(|asked| as_message(asked)).collect());
        let answers = Arc::new(Mutex::new(Answers { waiting: up.len(), all: Vec::with_capacity(up.len()) }));
        inner.queries.fetch_add(1, Relaxed);
        let open = Arc::new(Open(Arc::clone(inner)));
        for (peer, up) in up {
            let (message, answers, open) = (Arc::clone(&message), Arc::clone(&answers), Arc::clone(&open));
            inner.handle.spawn(async move {
                let tiers = find(&peer, &up, &message).await;
                let mut answers = lock(&answers);
                answers.waiting -= 1;
                answers.all.extend(tiers.map(|tiers| Answer { peer, up, tiers }));
                drop(open);
            });
        }
        let deadline = Instant::now() + FIND_TIME_MAX + ANSWER_MARGIN;
        Ok(Some(Self { inner: Arc::clone(inner), questions: asked, answers, deadline }))
    }

    /// `None` while answers are awaited; else per question a byte per key: 0 nobody has it, 1 somebody has it in
    /// memory, 2 on SSD.
    pub fn poll(&self) -> Option<Vec<Vec<u8>>> {
        let answers = lock(&self.answers);
        if answers.waiting > 0 && Instant::now() < self.deadline {
            return None;
        }
        let merged = |(number, asked): (usize, &Arc<Asked>)| {
            let mut best = vec![0; asked.keys.len()];
            for tiers in answers.all.iter().filter_map(|answer| answer.tiers.get(number)) {
                for (best, tier) in best.iter_mut().zip(tiers) {
                    *best = if *best == 1 || *tier == 1 { 1 } else { (*best).max(*tier) };
                }
            }
            best
        };
        Some(self.questions.iter().enumerate().map(merged).collect())
    }

    /// Bring `keys[range]` of a question into memory from whoever has them. `parent`: of the first of them, if the
    /// question is chained and it is not the key before it. `None`: nobody has the first, or too much is on its way.
    pub fn fetch(&self, question: usize, range: Range<usize>, parent: Option<Key>) -> Result<Option<PeerFetch>> {
        self.inner.pool.member()?;
        let asked = self.questions.get(question).filter(|asked| range.end <= asked.keys.len());
        let Some(asked) = asked.filter(|_| range.start <= range.end) else {
            let text = format!("there is no question {question} with keys {range:?}: it was not asked");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        };
        let source = |answer: &Answer| Source {
            peer: Arc::clone(&answer.peer),
            up: Arc::clone(&answer.up),
            tiers: answer.tiers.get(question).cloned().unwrap_or_default(),
        };
        let sources: Vec<Source> = lock(&self.answers).all.iter().map(source).collect();
        Ok(PeerFetch::begin(&self.inner, asked, sources, range, parent))
    }
}

fn asked(inner: &Inner, question: Question) -> Result<Arc<Asked>> {
    let (fingerprint, group) = inner.pool.namespace_name(question.namespace)?;
    let part_bytes = inner.pool.namespace_info(question.namespace)?.part_bytes;
    let name = proto::NamespaceName { fingerprint: fingerprint.to_vec(), group, part_bytes };
    Ok(Arc::new(Asked { namespace: question.namespace, keys: question.keys, chained: question.chained, name }))
}

fn as_message(asked: &Asked) -> proto::Question {
    let (key_bytes, keys) = wire::pack(&asked.keys);
    proto::Question { namespace: Some(asked.name.clone()), key_bytes, keys, chained: asked.chained }
}

/// Ask one peer. What it says wrong counts as failing.
async fn find(peer: &Peer, up: &Up, questions: &[proto::Question]) -> Option<Vec<Vec<u8>>> {
    peer.counters.finds.add(1);
    let started = Instant::now();
    match up.calls.find(questions.to_vec()).await {
        Ok(reply) if is_proper(&reply, questions) => {
            peer.counters.finds_answered.add(1);
            let mut state = lock(&peer.state);
            let now = started.elapsed();
            state.rtt = Some(state.rtt.map_or(now, |before| (before * 3 + now) / 4));
            Some(reply.tiers)
        }
        Ok(_) => {
            peer.fail(up, "its answers are longer than what it was asked for, or unknown");
            None
        }
        Err(failure) => {
            peer.note(up, &failure);
            None
        }
    }
}

fn is_proper(reply: &proto::FindReply, questions: &[proto::Question]) -> bool {
    let fits = |(tiers, question): (&Vec<u8>, &proto::Question)| {
        tiers.len() <= wire::key_count(question).unwrap_or(0) && tiers.iter().all(|tier| *tier <= 2)
    };
    reply.tiers.len() == questions.len() && reply.tiers.iter().zip(questions).all(fits)
}
