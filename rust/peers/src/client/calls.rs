//! Calls to one peer, each with its deadline.

use std::time::Duration;

use pegaflow_engine::{Error, ErrorKind, Result};
use prost::Message;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::credentials::Credentials;
use crate::limits::{CONNECT_TIME_MAX, FIND_TIME_MAX, LEASE_WAIT_MAX, MESSAGE_BYTES_MAX, PROTOCOL_VERSION};
use crate::proto;
use crate::proto::peer_client::PeerClient;
use crate::transport::ControlCalls;
use crate::wire::Sealed;

/// What became of a call.
pub(crate) type Called<T> = std::result::Result<T, Failure>;

/// A call that failed, and what that says of the peer.
pub(crate) struct Failure {
    pub(crate) error: Error,
    pub(crate) kind: FailureKind,
}

/// What a failed call says of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// It is to be left alone.
    Broken,
    /// It does not know this session (any more).
    Forgotten,
    /// It has too much to do: a miss.
    Busy,
}

/// The client of one session.
#[derive(Clone)]
pub(crate) struct Calls {
    client: PeerClient<Channel>,
    credentials: Credentials,
    session: [u8; 16],
    term: u64,
    handle: Handle,
}

impl Calls {
    pub(crate) fn new(channel: Channel, credentials: Credentials, session: [u8; 16], handle: Handle) -> Self {
        let client = PeerClient::new(channel)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Self { client, credentials, session, term: 0, handle }
    }

    /// With the term that the peer has greeted with.
    pub(crate) fn in_term(mut self, term: u64) -> Self {
        self.term = term;
        self
    }

    pub(crate) fn session(&self) -> [u8; 16] {
        self.session
    }

    fn signed<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        self.credentials.sign(request.metadata_mut());
        request
    }

    pub(crate) async fn hello(&self, pool_id: u64) -> Called<proto::HelloReply> {
        let message = proto::HelloRequest { version: PROTOCOL_VERSION, session: self.session.to_vec(), pool_id };
        let mut client = self.client.clone();
        within(CONNECT_TIME_MAX, client.hello(self.signed(message))).await
    }

    pub(crate) async fn find(&self, questions: Vec<proto::Question>) -> Called<proto::FindReply> {
        let message = proto::FindRequest { session: self.session.to_vec(), term: self.term, questions };
        let mut client = self.client.clone();
        within(FIND_TIME_MAX, client.find(self.signed(message))).await
    }

    /// Waits; not for tasks.
    pub(crate) fn lease(&self, mut message: proto::LeaseRequest) -> Called<proto::LeaseReply> {
        (message.session, message.term) = (self.session.to_vec(), self.term);
        let wait = Duration::from_millis(u64::from(message.wait_ms)).min(LEASE_WAIT_MAX);
        let mut client = self.client.clone();
        let call = client.lease(self.signed(message.clone()));
        opened(self.handle.block_on(within(CONNECT_TIME_MAX + wait, call))?, &message)
    }

    /// Give a lease back. Whether it had been held until then. Waits; not for tasks.
    pub(crate) fn release(&self, lease: u64) -> Called<bool> {
        let message = proto::ReleaseRequest { session: self.session.to_vec(), term: self.term, leases: vec![lease] };
        let mut client = self.client.clone();
        let reply = self.handle.block_on(within(CONNECT_TIME_MAX, client.release(self.signed(message))))?;
        Ok(reply.held == [1])
    }
}

/// For transports, which call from threads of their own.
impl ControlCalls for Calls {
    fn connect(&self, mut message: proto::ConnectRequest) -> Result<proto::ConnectReply> {
        (message.session, message.term) = (self.session.to_vec(), self.term);
        let mut client = self.client.clone();
        let called = self.handle.block_on(within(CONNECT_TIME_MAX, client.connect(self.signed(message))));
        called.map_err(|failure| failure.error)
    }

    fn give_up(&self, mut message: proto::ConnectRequest) {
        (message.session, message.term) = (self.session.to_vec(), self.term);
        let (mut client, request) = (self.client.clone(), self.signed(message));
        self.handle.spawn(async move { within(CONNECT_TIME_MAX, client.connect(request)).await.is_ok() });
    }

    fn regions(&self, mut message: proto::RegionsRequest) -> Result<proto::RegionsReply> {
        (message.session, message.term) = (self.session.to_vec(), self.term);
        let mut client = self.client.clone();
        let called = self.handle.block_on(within(CONNECT_TIME_MAX, client.regions(self.signed(message.clone()))));
        called.and_then(|reply| opened(reply, &message)).map_err(|failure| failure.error)
    }
}

/// A reply to what was asked, or a failure.
fn opened<T: Sealed>(reply: T, request: &impl Message) -> Called<T> {
    reply.opened(request).ok_or_else(|| Failure {
        error: Error::new(
            ErrorKind::Corrupt,
            "it answers something else than it was asked, or not all arrived as it was sent",
        ),
        kind: FailureKind::Broken,
    })
}

async fn within<T>(time: Duration, call: impl Future<Output = std::result::Result<Response<T>, Status>>) -> Called<T> {
    match timeout(time, call).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(failure(&status)),
        Err(_) => Err(Failure {
            error: Error::new(ErrorKind::Busy, format!("it has not answered within {} ms", time.as_millis())),
            kind: FailureKind::Broken,
        }),
    }
}

fn failure(status: &Status) -> Failure {
    let kind = match status.code() {
        Code::FailedPrecondition => FailureKind::Forgotten,
        Code::ResourceExhausted => FailureKind::Busy,
        _ => FailureKind::Broken,
    };
    let error_kind = match status.code() {
        Code::Unimplemented => ErrorKind::NotFound,
        // Who opens or uses a channel knows it by that from a peer that does not answer.
        Code::ResourceExhausted => ErrorKind::Full,
        _ => ErrorKind::Busy,
    };
    let said = status.message().chars().filter(|character| !character.is_control()).take(200).collect::<String>();
    Failure { error: Error::new(error_kind, format!("{:?}: {said}", status.code())), kind }
}
