//! Keeps the link to one peer: looks its name up, connects, greets, greets again, and leaves it alone when it fails.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::{Error, ErrorKind, Result};
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use super::Inner;
use super::calls::Calls;
use super::peer::{Link, Peer, Up, split};
use crate::limits::{
    BACKOFF_MAX, BACKOFF_MIN, CONNECT_TIME_MAX, GREETING_INTERVAL, HOST_ADDRESSES_MAX, ITSELF_INTERVAL, PING_INTERVAL,
    PROTOCOL_VERSION,
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
    let found = timeout(CONNECT_TIME_MAX, resolve(&peer.address)).await;
    let (host, addresses) = found.unwrap_or_else(|_| Err(failed("its name is not looked up in time".to_owned())))?;
    let mut best = Err(failed(format!("'{host}' has no address")));
    for address in addresses {
        let tried = timeout(2 * CONNECT_TIME_MAX, greet_at(inner, &host, address)).await;
        let tried = tried.unwrap_or_else(|_| Err(failed("it does not answer".to_owned())));
        if is_enough(&mut best, tried, |(up, _)| up.hello.pool_id != inner.pool.pool_id()) {
            break;
        }
    }
    let (up, rtt) = best?;
    let mut state = lock(&peer.state);
    state.rtt = Some(rtt);
    (state.is_good, state.problem) = (false, None);
    if up.hello.pool_id != inner.pool.pool_id() {
        state.link = Link::Up(Arc::clone(&up));
    }
    Ok(up)
}

async fn greet_at(inner: &Inner, host: &str, address: SocketAddr) -> Result<(Arc<Up>, Duration)> {
    let channel = connect(inner, host, address).await?;
    let session = random::bytes()?;
    let calls = Calls::new(channel, inner.credentials.clone(), session, inner.handle.clone());
    let started = Instant::now();
    let hello = calls.hello(inner.pool.pool_id()).await.map_err(|failure| failure.error)?;
    if hello.version != PROTOCOL_VERSION {
        return Err(failed(format!("it speaks version {} of the protocol, not {PROTOCOL_VERSION}", hello.version)));
    }
    let up = Up { number: GREETINGS.fetch_add(1, Relaxed), ip: address.ip(), calls: calls.in_term(hello.term), hello };
    Ok((Arc::new(up), started.elapsed()))
}

/// Take what came of one more address, if that is better than what there was. Whether it is what is `wanted`.
fn is_enough<T>(best: &mut Result<T>, tried: Result<T>, wanted: impl Fn(&T) -> bool) -> bool {
    let is_wanted = tried.as_ref().is_ok_and(wanted);
    if is_wanted || best.is_err() {
        *best = tried;
    }
    is_wanted
}

/// As long as it is there. Whether it is to be greeted again at once: it has started anew, or has forgotten us.
async fn stay(inner: &Arc<Inner>, peer: &Peer, up: Arc<Up>) -> bool {
    while !peer.is_stopped() {
        tokio::select! {
            () = sleep(GREETING_INTERVAL) => {}
            () = peer.changed.notified() => {}
        }
        if !peer.is_still(&up) {
            return matches!(lock(&peer.state).link, Link::Unknown);
        }
        match up.calls.hello(inner.pool.pool_id()).await {
            Ok(hello) if hello.term == up.hello.term && hello.pool_id == up.hello.pool_id => {}
            Ok(_) => peer.renew(&up),
            Err(failure) => peer.note(&up, &failure),
        }
    }
    true
}

fn failed(message: String) -> Error {
    Error::new(ErrorKind::Busy, message)
}

/// Name for certificates, and the addresses behind it.
async fn resolve(address: &str) -> Result<(String, Vec<SocketAddr>)> {
    let (host, port) = split(address).ok_or_else(|| failed(format!("'{address}' is no address")))?;
    let host = host.to_owned();
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok((host, vec![SocketAddr::new(ip, port)]));
    }
    let named = host.clone();
    let look_up = move || (named.as_str(), port).to_socket_addrs().map(|all| all.take(HOST_ADDRESSES_MAX).collect());
    match tokio::task::spawn_blocking(look_up).await {
        Ok(Ok(addresses)) => Ok((host, addresses)),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes of addresses with these outcomes (a port, or an error), and how many are tried. 1 is this pool.
    fn tried(outcomes: [Option<u16>; 4]) -> (Option<u16>, usize) {
        let mut best = Err(failed("none".to_owned()));
        let outcome = |port: Option<u16>| port.ok_or_else(|| failed("down".to_owned()));
        let enough = outcomes.into_iter().position(|port| is_enough(&mut best, outcome(port), |port| *port != 1));
        (best.ok(), enough.map_or(outcomes.len(), |last| last + 1))
    }

    #[test]
    fn addresses_of_a_name_are_tried_until_one_answers_that_is_not_this_pool() {
        assert_eq!(tried([None, None, Some(3), Some(4)]), (Some(3), 3));
        assert_eq!(tried([Some(1), None, None, Some(4)]), (Some(4), 4));
        assert_eq!(tried([None, Some(1), None, None]), (Some(1), 4), "only this pool itself is there");
        assert_eq!(tried([None; 4]), (None, 4));
    }

    #[test]
    fn a_name_stands_for_all_its_addresses() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (host, found) = runtime.block_on(resolve("localhost:7441")).unwrap();
        let all: Vec<SocketAddr> = ("localhost", 7441).to_socket_addrs().unwrap().collect();
        assert_eq!((host.as_str(), found), ("localhost", all));
        assert!(runtime.block_on(resolve("host.invalid:1")).is_err());
    }
}
