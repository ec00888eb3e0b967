//! Keeps the link to one peer: looks its name up, connects, greets, greets again, and leaves it alone when it fails.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::{Error, ErrorKind, Result};
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use super::Inner;
use super::calls::{Calls, Failure};
use super::peer::{Link, Peer, Up, split};
use crate::limits::{
    BACKOFF_MAX, BACKOFF_MIN, CONNECT_TIME_MAX, GREETING_INTERVAL, ITSELF_INTERVAL, PING_INTERVAL, PROTOCOL_VERSION,
};
use crate::random;
use crate::server::described;
use crate::sync::{AtomicU64, Relaxed, lock};

static GREETINGS: AtomicU64 = AtomicU64::new(1);

/// Until the peer is stopped.
pub(crate) async fn keep(inner: Arc<Inner>, peer: Arc<Peer>) {
    let mut pause = BACKOFF_MIN;
    while !peer.is_stopped() {
        peer.counters.connects.add(1);
        let rest = match greet(&inner, &peer).await {
            Ok(up) if up.hello.pool_id == inner.pool.pool_id() => {
                lock(&peer.state).link = Link::Itself;
                Some(ITSELF_INTERVAL)
            }
            Ok(up) => {
                let since = Instant::now();
                let renews = stay(&inner, &peer, up).await;
                if lock(&peer.state).is_good || since.elapsed() > BACKOFF_MAX {
                    pause = BACKOFF_MIN;
                }
                // A peer that forgets whom it has just met has something wrong with it.
                (!renews || since.elapsed() < BACKOFF_MIN).then_some(pause)
            }
            Err(error) => {
                let mut state = lock(&peer.state);
                state.link = Link::BackingOff;
                if state.problem.as_deref() != Some(&error.to_string()) {
                    log::info!("pegaflow: peer {} is not to be had: {error}", peer.address);
                    state.problem = Some(error.to_string());
                }
                drop(state);
                peer.counters.failures.add(1);
                Some(pause)
            }
        };
        let Some(rest) = rest else { continue };
        rest_for(&peer, rest).await;
        if rest == pause {
            pause = (pause * 2).min(BACKOFF_MAX);
        }
    }
}

/// Leave it alone for so long, unless it is stopped.
async fn rest_for(peer: &Peer, time: Duration) {
    let until = tokio::time::Instant::now() + time;
    while !peer.is_stopped() {
        tokio::select! {
            () = tokio::time::sleep_until(until) => return,
            () = peer.changed.notified() => {}
        }
    }
}

/// Connect and greet.
async fn greet(inner: &Arc<Inner>, peer: &Peer) -> Result<Arc<Up>> {
    let work = async {
        let (host, address) = resolve(&peer.address).await?;
        let channel = connect(inner, &host, address).await?;
        let session = random::bytes()?;
        let calls = Calls::new(channel, inner.credentials.clone(), session, inner.handle.clone());
        let started = Instant::now();
        let hello = calls.hello(inner.pool.pool_id()).await.map_err(|failure| failure.error)?;
        if hello.version != PROTOCOL_VERSION {
            return Err(failed(format!("it speaks version {} of the protocol, not {PROTOCOL_VERSION}", hello.version)));
        }
        let up =
            Up { number: GREETINGS.fetch_add(1, Relaxed), ip: address.ip(), calls: calls.in_term(hello.term), hello };
        Ok((Arc::new(up), started.elapsed()))
    };
    let (up, rtt) =
        timeout(2 * CONNECT_TIME_MAX, work).await.unwrap_or_else(|_| Err(failed("it does not answer".to_owned())))?;
    let mut state = lock(&peer.state);
    state.rtt = Some(rtt);
    (state.is_good, state.problem) = (false, None);
    if up.hello.pool_id != inner.pool.pool_id() {
        state.link = Link::Up(Arc::clone(&up));
    }
    Ok(up)
}

/// As long as it is there. Whether it is to be greeted again at once: it has started anew, or has forgotten us.
async fn stay(inner: &Arc<Inner>, peer: &Peer, up: Arc<Up>) -> bool {
    while !peer.is_stopped() {
        let is_up = || matches!(&lock(&peer.state).link, Link::Up(now) if now.number == up.number);
        tokio::select! {
            () = sleep(GREETING_INTERVAL) => {}
            () = peer.changed.notified() => {}
        }
        if !is_up() {
            return matches!(lock(&peer.state).link, Link::Unknown);
        }
        match up.calls.hello(inner.pool.pool_id()).await {
            Ok(hello) if hello.term == up.hello.term && hello.pool_id == up.hello.pool_id => {}
            Ok(_) => peer.renew(&up),
            Err(Failure { error, .. }) => peer.fail(&up, &error.to_string()),
        }
    }
    true
}

fn failed(message: String) -> Error {
    Error::new(ErrorKind::Busy, message)
}

/// Name for certificates, and the first address.
async fn resolve(address: &str) -> Result<(String, SocketAddr)> {
    let (host, port) = split(address).ok_or_else(|| failed(format!("'{address}' is no address")))?;
    let host = host.to_owned();
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok((host, SocketAddr::new(ip, port)));
    }
    let named = host.clone();
    let looked_up =
        tokio::task::spawn_blocking(move || (named.as_str(), port).to_socket_addrs().map(|mut all| all.next()));
    match looked_up.await {
        Ok(Ok(Some(address))) => Ok((host, address)),
        Ok(Ok(None)) => Err(failed(format!("'{host}' has no address"))),
        Ok(Err(error)) => Err(failed(format!("'{host}' cannot be looked up: {error}"))),
        Err(_) => Err(failed(format!("looking '{host}' up has failed by a defect"))),
    }
}

async fn connect(inner: &Inner, host: &str, address: SocketAddr) -> Result<Channel> {
    let tls = inner.credentials.client_tls(host)?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let wrong = |error: tonic::transport::Error| failed(described(&error));
    let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
        .map_err(wrong)?
        .connect_timeout(CONNECT_TIME_MAX)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_INTERVAL)
        .keep_alive_while_idle(true);
    if let Some(tls) = tls {
        endpoint = endpoint.tls_config(tls).map_err(wrong)?;
    }
    endpoint.connect().await.map_err(wrong)
}
