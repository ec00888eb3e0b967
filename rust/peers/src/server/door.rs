//! Who is let in: decided before anything of what a call says is read, so that nobody else costs memory.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::service::Interceptor;
use tonic::{Request, Status};

use super::mark::Mark;
use super::service::Term;

/// A call that is worked on.
#[derive(Clone)]
pub(crate) struct Admitted {
    pub(crate) connection: Arc<Mark>,
    /// There is no room for it if it may wait for something.
    pub(crate) is_extra: bool,
    _permit: Arc<OwnedSemaphorePermit>,
}

/// Before the service of one term.
#[derive(Clone)]
pub(crate) struct Door(pub(crate) Arc<Term>);

impl Interceptor for Door {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let term = &self.0;
        if !term.credentials.accepts(request.metadata()) {
            term.counters.calls_unknown.add(1);
            return Err(Status::unauthenticated(
                "the token is missing or another one: set the same pegaflow.peer_token",
            ));
        }
        let connection = request.extensions().get::<Arc<Mark>>().cloned();
        let Some(connection) = connection else { return Err(Status::internal("a call without a connection")) };
        // Which call it is shows only later.
        let take = |permits: &Arc<Semaphore>| Arc::clone(permits).try_acquire_owned().ok();
        let usual = take(&term.permits).map(|permit| (permit, false));
        let permit = usual.or_else(|| take(&term.extra_permits).map(|permit| (permit, true)));
        let Some((permit, is_extra)) = permit.filter(|_| connection.admit()) else {
            term.counters.calls_refused.add(1);
            return Err(Status::resource_exhausted("too many calls or connections at a time"));
        };
        term.counters.calls.add(1);
        request.extensions_mut().insert(Admitted { connection, is_extra, _permit: Arc::new(permit) });
        Ok(request)
    }
}
