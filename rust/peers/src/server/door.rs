//! Who is let in: decided before anything of what a call says is read, so that nobody else costs memory.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tonic::service::Interceptor;
use tonic::{Request, Status};

use super::mark::Mark;
use super::service::Term;

/// A call that is worked on.
#[derive(Clone)]
pub(crate) struct Admitted {
    pub(crate) connection: Arc<Mark>,
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
        let permit = Arc::clone(&term.permits).try_acquire_owned().ok().filter(|_| connection.admit());
        let Some(permit) = permit else {
            term.counters.calls_refused.add(1);
            return Err(Status::resource_exhausted("too many calls or connections at a time"));
        };
        term.counters.calls.add(1);
        request.extensions_mut().insert(Admitted { connection, _permit: Arc::new(permit) });
        Ok(request)
    }
}
