//! What a server answers. Every call is checked, bounded, and worked on from the pool's index.

use std::sync::Arc;

use pegaflow_engine::tier::{Tier, TierState};
use pegaflow_engine::{Error, ErrorKind, Key, Namespace, Pool};
use tokio::sync::Semaphore;
use tokio::task::yield_now;
use tonic::{Code, Request, Response, Status};

use super::counters::Counters;
use super::door::Admitted;
use super::leases::{Leases, SessionId};
use super::lending::lend;
use super::sessions::Sessions;
use crate::credentials::Credentials;
use crate::limits::{
    CALL_KEYS_MAX, CALL_QUESTIONS_MAX, FIND_BATCH_KEYS, LEASE_TIME, PROTOCOL_VERSION, SESSION_LEASES_MAX,
};
use crate::proto;
use crate::proto::peer_server::Peer;
use crate::transport::RegionSource;
use crate::wire::{self, Sealed};

/// What all calls of one term share.
pub(crate) struct Term {
    pub(crate) number: u64,
    pub(crate) pool: Arc<Pool>,
    pub(crate) credentials: Credentials,
    pub(crate) sessions: Sessions,
    pub(crate) leases: Arc<Leases>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) regions: Option<Arc<dyn RegionSource>>,
    pub(crate) data_port: u16,
    pub(crate) permits: Arc<Semaphore>,
    /// Beyond that for calls that wait for nothing: who is full still greets, and takes back what it has leased.
    pub(crate) extra_permits: Arc<Semaphore>,
}

impl Term {
    /// Room for so many calls at a time.
    pub(crate) fn permits(calls: usize) -> Arc<Semaphore> {
        Arc::new(Semaphore::new(calls))
    }
}

/// The service of one term.
#[derive(Clone)]
pub(crate) struct Service(pub(crate) Arc<Term>);

impl Service {
    /// A call that may wait, or take long, if there is room for it.
    fn roomy<T>(&self, request: &Request<T>) -> Result<Admitted, Status> {
        let admitted = admitted(request)?;
        if admitted.is_extra {
            self.0.counters.calls_refused.add(1);
            return Err(Status::resource_exhausted("too many calls at a time"));
        }
        Ok(admitted)
    }

    /// The client of a call, if it has greeted in this term.
    fn session(&self, admitted: &Admitted, session: &[u8], term: u64) -> Result<SessionId, Status> {
        let known = wire::sixteen(session)
            .filter(|id| term == self.0.number && self.0.sessions.hear(*id, &admitted.connection));
        known.ok_or_else(|| Status::failed_precondition("this session is not known here: greet first"))
    }

    fn malformed(&self, what: &str) -> Status {
        self.0.counters.calls_malformed.add(1);
        Status::invalid_argument(format!("the call is no proper one: {what}"))
    }

    /// One byte per key of a question, up to the last that is anywhere.
    async fn tiers(&self, question: &proto::Question, turn: &mut Turn) -> Result<Vec<u8>, Status> {
        let Some((fingerprint, group, part_bytes)) = wire::name_of(question.namespace.as_ref()) else {
            return Err(self.malformed("a question names no namespace"));
        };
        let keys = wire::keys_of(question).ok_or_else(|| self.malformed("what a question asks for are no keys"))?;
        let found = self.0.pool.find_namespace(&fingerprint, group, part_bytes).map_err(status)?;
        let Some(ns) = found else { return Ok(Vec::new()) };
        where_are(&self.0.pool, ns, &keys, question.chained, turn).await.map_err(status)
    }

    /// Run what may wait for a device.
    async fn waiting<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn RegionSource) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Status> {
        let regions = self.0.regions.clone().ok_or_else(|| Status::unimplemented("there is no RDMA here"))?;
        let done = tokio::task::spawn_blocking(move || work(&*regions)).await;
        done.map_err(|_| Status::internal("the work on a device has failed by a defect"))?.map_err(status)
    }
}

/// A call as the door has let it in.
fn admitted<T>(request: &Request<T>) -> Result<Admitted, Status> {
    request.extensions().get().cloned().ok_or_else(|| Status::internal("a call that nobody has let in"))
}

/// How much a call has looked up since others had their turn.
#[derive(Default)]
struct Turn {
    keys: usize,
}

impl Turn {
    /// Before so many keys are looked up.
    async fn take(&mut self, keys: usize) {
        if self.keys > 0 && self.keys + keys > FIND_BATCH_KEYS {
            self.keys = 0;
            yield_now().await;
        }
        self.keys += keys;
    }
}

/// One byte per key, up to the last that is anywhere.
async fn where_are(pool: &Pool, ns: Namespace, keys: &[Key], chained: bool, turn: &mut Turn) -> Result<Vec<u8>, Error> {
    let mut tiers = Vec::with_capacity(keys.len());
    for batch in keys.chunks(FIND_BATCH_KEYS) {
        turn.take(batch.len()).await;
        for tier in pool.tiers(ns, batch)? {
            match tier {
                Tier::Absent if chained => return Ok(tiers),
                Tier::Absent => tiers.push(0),
                Tier::Memory => tiers.push(1),
                Tier::Ssd => tiers.push(2),
            }
        }
    }
    Ok(tiers)
}

/// An error of the engine as the caller is told it.
pub(crate) fn status(error: Error) -> Status {
    let code = match error.kind() {
        ErrorKind::InvalidArgument => Code::InvalidArgument,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::Busy | ErrorKind::Full | ErrorKind::ShmFull => Code::ResourceExhausted,
        _ => Code::Unavailable,
    };
    Status::new(code, error.to_string())
}

#[tonic::async_trait]
impl Peer for Service {
    async fn hello(&self, request: Request<proto::HelloRequest>) -> Result<Response<proto::HelloReply>, Status> {
        let admitted = admitted(&request)?;
        let hello = request.get_ref();
        if hello.version != PROTOCOL_VERSION {
            let text = format!("this host speaks version {PROTOCOL_VERSION} of the protocol of peers");
            return Err(Status::failed_precondition(text));
        }
        let id = wire::sixteen(&hello.session).ok_or_else(|| self.malformed("a session has 16 bytes"))?;
        let term = &self.0;
        match term.sessions.greet(id, &admitted.connection) {
            Some(is_new) => term.counters.sessions_begun.add(u64::from(is_new)),
            None => return Err(Status::resource_exhausted("too many clients")),
        }
        let ssd = term.pool.ssd().map_err(status)?;
        Ok(Response::new(proto::HelloReply {
            version: PROTOCOL_VERSION,
            pool_id: term.pool.pool_id(),
            term: term.number,
            data_port: u32::from(term.data_port),
            nics: term.regions.as_ref().map(|regions| regions.nics()).unwrap_or_default(),
            ssd: ssd.is_some_and(|facts| facts.state == TierState::Serving),
        }))
    }

    async fn find(&self, request: Request<proto::FindRequest>) -> Result<Response<proto::FindReply>, Status> {
        let admitted = self.roomy(&request)?;
        let find = request.get_ref();
        self.session(&admitted, &find.session, find.term)?;
        let keys = find.questions.iter().map(|question| wire::key_count(question).unwrap_or(0)).sum::<usize>();
        if find.questions.len() > CALL_QUESTIONS_MAX || keys > CALL_KEYS_MAX {
            return Err(self.malformed("it asks for too much"));
        }
        let (mut tiers, mut turn) = (Vec::with_capacity(find.questions.len()), Turn::default());
        for question in &find.questions {
            tiers.push(self.tiers(question, &mut turn).await?);
        }
        let hits = tiers.iter().flatten().filter(|tier| **tier != 0).count();
        self.0.counters.finds.add(1);
        self.0.counters.find_keys.add(keys as u64);
        self.0.counters.find_keys_hit.add(hits as u64);
        Ok(Response::new(proto::FindReply { tiers }))
    }

    async fn lease(&self, request: Request<proto::LeaseRequest>) -> Result<Response<proto::LeaseReply>, Status> {
        let admitted = self.roomy(&request)?;
        let lease = request.get_ref();
        let session = self.session(&admitted, &lease.session, lease.term)?;
        let question = lease.question.as_ref().ok_or_else(|| self.malformed("a lease without a question"))?;
        let name = wire::name_of(question.namespace.as_ref());
        let name = name.ok_or_else(|| self.malformed("a question names no namespace"))?;
        let keys = wire::keys_of(question).filter(|keys| keys.len() <= CALL_KEYS_MAX);
        let keys = keys.ok_or_else(|| self.malformed("what a question asks for are no keys"))?;
        let parent = match lease.parent.as_slice() {
            [] => None,
            bytes => Some(Key::new(bytes).map_err(|_| self.malformed("a parent is no key"))?),
        };
        let blocks = lend(&self.0, session, name, &keys, parent, lease).await?;
        Ok(Response::new(blocks.sealed(lease)))
    }

    async fn release(&self, request: Request<proto::ReleaseRequest>) -> Result<Response<proto::ReleaseReply>, Status> {
        let admitted = admitted(&request)?;
        let release = request.get_ref();
        let session = self.session(&admitted, &release.session, release.term)?;
        if release.leases.len() > SESSION_LEASES_MAX {
            return Err(self.malformed("nobody has so many leases"));
        }
        let usable = self.0.pool.member().is_ok();
        let held = |number: &u64| u8::from(self.0.leases.release(session, *number) && usable);
        Ok(Response::new(proto::ReleaseReply { held: release.leases.iter().map(held).collect() }))
    }

    async fn regions(&self, request: Request<proto::RegionsRequest>) -> Result<Response<proto::RegionsReply>, Status> {
        let admitted = self.roomy(&request)?;
        let regions = request.get_ref();
        self.session(&admitted, &regions.session, regions.term)?;
        if regions.wanted.len() > CALL_KEYS_MAX {
            return Err(self.malformed("it asks for too much"));
        }
        let (version, wanted) = (regions.version, regions.wanted.clone());
        let known = self.waiting(move |source| source.regions(version, &wanted)).await?;
        Ok(Response::new(known.sealed(regions)))
    }

    async fn connect(&self, request: Request<proto::ConnectRequest>) -> Result<Response<proto::ConnectReply>, Status> {
        let admitted = self.roomy(&request)?;
        let session = self.session(&admitted, &request.get_ref().session, request.get_ref().term)?;
        let connect = request.get_ref().clone();
        let term = Arc::clone(&self.0);
        let made = self.waiting(move |source| {
            let made = source.connect(session, &connect);
            // If it was taken for gone meanwhile, nobody else would destroy what was made since.
            if !term.sessions.knows(session) {
                source.session_gone(session);
            }
            made
        });
        made.await.map(Response::new)
    }

    async fn health(&self, request: Request<proto::HealthRequest>) -> Result<Response<proto::HealthReply>, Status> {
        let _admitted = admitted(&request)?;
        self.0.pool.member().map_err(status)?;
        Ok(Response::new(proto::HealthReply { term: self.0.number }))
    }
}

/// How long a lease lasts, as a client is told it.
pub(crate) fn lease_time_ms() -> u32 {
    LEASE_TIME.as_millis() as u32
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use pegaflow_engine::OpenOptions;

    use super::*;

    #[test]
    fn a_call_that_looks_up_much_lets_others_go_on_in_between() {
        let shm_dir = std::path::PathBuf::from(format!("/dev/shm/pega-peers-turns-{}", std::process::id()));
        std::fs::create_dir(&shm_dir).unwrap();
        let options = OpenOptions { shm_dir: shm_dir.clone(), pool_bytes: Some(1 << 20), ..OpenOptions::default() };
        let pool = Pool::open("turns", &options).unwrap();
        let ns = pool.namespace(&[9; 32], 0, &[4096], "test").unwrap();
        let keys: Vec<Key> = (0..FIND_BATCH_KEYS * 3 / 2).map(|n| Key::new(&n.to_le_bytes()).unwrap()).collect();
        // One long question, and as much in many short ones.
        for question_keys in [keys.len(), 100] {
            let mut work = pin!(async {
                let mut turn = Turn::default();
                for _ in 0..6 {
                    for question in keys.chunks(question_keys) {
                        let tiers = where_are(&pool, ns, question, false, &mut turn).await.unwrap();
                        assert_eq!(tiers, vec![0; question.len()]);
                    }
                }
            });
            let mut turns = 1;
            while work.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                turns += 1;
            }
            assert!(turns >= 6 * keys.len() / FIND_BATCH_KEYS, "{turns} turns for questions of {question_keys}");
        }
        drop(pool);
        std::fs::remove_dir_all(shm_dir).unwrap();
    }
}
