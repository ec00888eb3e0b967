//! One piece of a fetch: slots, lease, read, release, check. In this order, whatever fails in between.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use pegaflow_engine::{BlockRef, Error, ErrorKind};

use super::slots::{self, Slots};
use super::{Fetch, Ready};
use crate::client::{Peer, Up};
use crate::limits::{CONNECT_TIME_MAX, LEASE_MARGIN, LEASE_TIME, LEASE_WAIT_MAX};
use crate::proto;
use crate::sync::lock;
use crate::transport::{Channel, PartRead, ReadOutcome, Ticket, Transport, TransportKind};
use crate::wire;

/// What became of a piece.
#[derive(Default)]
pub(crate) struct Attempt {
    /// By position.
    pub(crate) ready: BTreeMap<usize, Ready>,
    /// It is of no use to ask somebody else for the rest.
    pub(crate) is_final: bool,
}

/// A channel to the peer that has greeted with this number.
pub(crate) struct OpenChannel {
    greeting: u64,
    channel: Box<dyn Channel>,
}

/// What a peer has leased to us.
struct Leased {
    ticket: Ticket,
    /// We read nothing from it after that.
    until: Instant,
    blocks: Vec<LeasedSlot>,
}

/// A leased block, and where it is to go.
struct LeasedSlot {
    /// Of its key.
    position: usize,
    target: BlockRef,
    /// Number of the block in the lease.
    index: u32,
    /// What the peer says of it.
    block: proto::LeasedBlock,
}

/// Fetch what is not in memory of `range` from one source.
pub(crate) fn attempt(fetch: &Fetch, source: usize, range: Range<usize>, channel: &mut Option<OpenChannel>) -> Attempt {
    let peer = &fetch.sources[source].peer;
    let slots = match slots::reserve(fetch, range) {
        Ok(slots) => slots,
        Err(error) => {
            log::warn!("pegaflow: nothing is fetched from peers: {error}");
            return Attempt { is_final: true, ..Attempt::default() };
        }
    };
    peer.counters.slots_refused.add(slots.refused as u64);
    let Slots { reserved, local, refused } = slots;
    let mut ready: BTreeMap<usize, Ready> = local.into_iter().map(|position| (position, Ready::Local)).collect();
    if reserved.is_empty() {
        return Attempt { ready, is_final: refused > 0 };
    }
    let count = reserved.len();
    let fetched = fetch_into(fetch, source, reserved, channel);
    peer.counters.blocks_fetched.add(fetched.len() as u64);
    peer.counters.bytes_fetched.add(fetched.len() as u64 * fetch.asked.block_bytes());
    peer.counters.blocks_missing.add((count - fetched.len()) as u64);
    ready.extend(fetched.into_iter().map(|(position, block)| (position, Ready::Fetched(block))));
    Attempt { ready, is_final: refused > 0 }
}

/// Fill reserved slots. All that do not come back filled are given up.
fn fetch_into(
    fetch: &Fetch,
    source: usize,
    reserved: Vec<(usize, BlockRef)>,
    channel: &mut Option<OpenChannel>,
) -> Vec<(usize, BlockRef)> {
    let (peer, up) = (&fetch.sources[source].peer, &fetch.sources[source].up);
    let blocks = |of: &[(usize, BlockRef)]| of.iter().map(|(_, block)| *block).collect::<Vec<_>>();
    let started = Instant::now();
    let Some(leased) = lease(fetch, source, &reserved) else {
        slots::give_up(fetch, &blocks(&reserved), true);
        return Vec::new();
    };
    let is_leased = |block: &BlockRef| leased.blocks.iter().any(|leased| leased.target == *block);
    let rest: Vec<BlockRef> = blocks(&reserved).into_iter().filter(|block| !is_leased(block)).collect();
    slots::give_up(fetch, &rest, true);
    peer.counters.blocks_leased.add(leased.blocks.len() as u64);
    let outcome = match open(fetch, peer, up, channel, leased.until) {
        Ok(open) => read(fetch, &leased, &mut *open.channel),
        Err(error) => ReadOutcome { arrived: Vec::new(), quiet: true, broken: Some(error) },
    };
    let filled = judge(fetch, peer, up, &leased, outcome, channel);
    if !filled.is_empty() {
        peer.praise();
        peer.note_bandwidth(filled.len() as u64 * fetch.asked.block_bytes(), started);
    }
    filled
}

/// Have the peer lease the blocks for these slots. `None`: none of them.
fn lease(fetch: &Fetch, source: usize, reserved: &[(usize, BlockRef)]) -> Option<Leased> {
    let (peer, up) = (&fetch.sources[source].peer, &fetch.sources[source].up);
    let (first, last) = (reserved.first()?.0, reserved.last()?.0);
    let tiers = &fetch.sources[source].tiers;
    let on_ssd = tiers.get(first..=last).is_none_or(|tiers| tiers.contains(&2));
    let (key_bytes, keys) = wire::pack(&fetch.asked.keys[first..=last]);
    let question =
        proto::Question { namespace: Some(fetch.asked.name.clone()), key_bytes, keys, chained: fetch.asked.chained };
    let request = proto::LeaseRequest {
        question: Some(question),
        wait_ms: if on_ssd { LEASE_WAIT_MAX.as_millis() as u32 } else { 0 },
        bytes_max: (last - first + 1) as u64 * fetch.asked.block_bytes(),
        parent: fetch.parent_of(first).map(|key| key.to_bytes()).unwrap_or_default(),
        ..proto::LeaseRequest::default()
    };
    let asked = Instant::now();
    let reply = match up.calls.lease(request) {
        Ok(reply) => reply,
        Err(failure) => {
            peer.note(up, &failure);
            return None;
        }
    };
    if reply.lease == 0 && reply.blocks.is_empty() {
        return None;
    }
    let parsed = parse(fetch, reply, first, last, reserved, asked);
    if parsed.is_none() {
        peer.fail(up, "its lease is none of what it was asked for");
    }
    parsed
}

/// What a lease says, if it can be true.
fn parse(
    fetch: &Fetch,
    reply: proto::LeaseReply,
    first: usize,
    last: usize,
    reserved: &[(usize, BlockRef)],
    asked: Instant,
) -> Option<Leased> {
    let ticket = Ticket { lease: reply.lease, secret: wire::sixteen(&reply.secret)? };
    let parts = fetch.asked.name.part_bytes.len();
    let mut blocks = Vec::with_capacity(reserved.len());
    let mut next = 0;
    for (index, block) in (0u32..).zip(reply.blocks) {
        let key = block.key as usize;
        if key < next || key > last - first || block.parts.len() != parts || block.used_bytes != 0 {
            return None;
        }
        next = key + 1;
        // Blocks between those that are wanted may be leased as well.
        if let Ok(at) = reserved.binary_search_by_key(&(first + key), |(position, _)| *position) {
            blocks.push(LeasedSlot { position: first + key, target: reserved[at].1, index, block });
        }
    }
    // Whatever it says: reading holds the lane, the slots and what may be on its way.
    let time = Duration::from_millis(u64::from(reply.time_ms)).min(LEASE_TIME).saturating_sub(LEASE_MARGIN);
    Some(Leased { ticket, until: asked + time, blocks })
}

/// The channel to this peer; opened if there is none since it has greeted. One that is worn stays until there is
/// another one of its kind.
fn open<'a>(
    fetch: &Fetch,
    peer: &Peer,
    up: &Up,
    channel: &'a mut Option<OpenChannel>,
    until: Instant,
) -> Result<&'a mut OpenChannel, Error> {
    if channel.as_ref().is_some_and(|open| open.greeting != up.number) {
        *channel = None;
    }
    let deadline = until.min(Instant::now() + CONNECT_TIME_MAX);
    if let Some(worn) = channel.as_mut().filter(|open| open.channel.is_worn()) {
        match open_best(fetch, up, deadline, Some(worn.channel.kind())) {
            Ok(opened) => worn.channel = opened,
            Err(error) => {
                log::info!("pegaflow: peer {} is read from as before: {error}", peer.address);
                worn.channel.keep();
            }
        }
    }
    if channel.is_none() {
        let opened = open_best(fetch, up, deadline, None)?;
        lock(&peer.state).transport = Some(opened.kind());
        *channel = Some(OpenChannel { greeting: up.number, channel: opened });
    }
    channel.as_mut().ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no channel"))
}

/// The first that can be opened, of this kind if one is named.
fn open_best(
    fetch: &Fetch,
    up: &Up,
    deadline: Instant,
    only: Option<TransportKind>,
) -> Result<Box<dyn Channel>, Error> {
    let mut last =
        Error::new(ErrorKind::NotFound, "there is no way for its bytes: it has neither a data port nor RDMA");
    let wanted = |transport: &&std::sync::Arc<dyn Transport>| only.is_none_or(|kind| kind == transport.kind());
    for transport in fetch.inner.transports.iter().filter(wanted) {
        if transport.kind() == TransportKind::Rdma {
            // Before any device can: what this process leaves behind when it dies is quarantined from now on.
            fetch.inner.pool.set_device_writes()?;
        }
        let calls = std::sync::Arc::new(up.calls.clone());
        match transport.open(up.ip, &up.hello, up.calls.session(), calls, deadline) {
            Ok(channel) => return Ok(channel),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn read(fetch: &Fetch, leased: &Leased, channel: &mut dyn Channel) -> ReadOutcome {
    let sizes = &fetch.asked.name.part_bytes;
    let mut parts = Vec::with_capacity(leased.blocks.len() * sizes.len());
    for LeasedSlot { target, index, block, .. } in &leased.blocks {
        for (part, (place, bytes)) in (0u32..).zip(block.parts.iter().zip(sizes)) {
            let (ticket, segment, offset) = (leased.ticket, place.segment, place.offset);
            parts.push(PartRead { ticket, index: *index, part, segment, offset, bytes: *bytes, target: *target });
        }
    }
    let outcome = channel.read(&parts, leased.until);
    if outcome.arrived.len() == parts.len() {
        return outcome;
    }
    let broken = Error::new(ErrorKind::Corrupt, "a transport has lost count of what it was to read");
    ReadOutcome { arrived: Vec::new(), quiet: outcome.quiet, broken: Some(broken) }
}

/// Decide which slots are filled with the right bytes, and give the others up. Only then is anything marked as written.
fn judge(
    fetch: &Fetch,
    peer: &Peer,
    up: &Up,
    leased: &Leased,
    outcome: ReadOutcome,
    channel: &mut Option<OpenChannel>,
) -> Vec<(usize, BlockRef)> {
    let targets: Vec<BlockRef> = leased.blocks.iter().map(|leased| leased.target).collect();
    // A stream carries the sender's own sums of what it has read. What a device wrote was compared with nothing, unless
    // the block has a checksum: it gets none then, so that nobody takes it for verified.
    let is_verified = channel.as_ref().is_some_and(|open| open.channel.kind() == TransportKind::Tcp);
    // By our own clock, which began before the peer's: what came later may be of another block.
    let in_time = Instant::now() <= leased.until;
    let released = up.calls.release(leased.ticket.lease);
    if let Some(error) = &outcome.broken {
        *channel = None;
        match error.kind() {
            ErrorKind::Full => peer.note_turned_away(up, &error.to_string()),
            _ => peer.fail(up, &error.to_string()),
        }
    }
    if !outcome.quiet {
        peer.counters.slots_quarantined.add(targets.len() as u64);
        *channel = None;
        slots::give_up(fetch, &targets, false);
        return Vec::new();
    }
    let held = released.unwrap_or_else(|failure| {
        peer.note(up, &failure);
        false
    });
    if !held || !in_time {
        peer.counters.leases_lost.add(1);
        slots::give_up(fetch, &targets, true);
        return Vec::new();
    }
    let parts = fetch.asked.name.part_bytes.len();
    let mut filled = Vec::with_capacity(targets.len());
    let mut empty = Vec::new();
    let mut wrong = 0;
    for (number, LeasedSlot { position, target, block, .. }) in leased.blocks.iter().enumerate() {
        let sums = outcome.arrived.get(number * parts..(number + 1) * parts);
        let sums: Option<Vec<u64>> = sums.and_then(|sums| sums.iter().copied().collect());
        let matches = |sums: &Vec<u64>| {
            let sum = sums.iter().fold(0u64, |sum, part| sum.wrapping_add(*part));
            block.checksum.is_none_or(|known| known == sum)
        };
        wrong += u64::from(sums.as_ref().is_some_and(|sums| !matches(sums)));
        match sums.filter(matches) {
            Some(sums) if mark(fetch, *target, &sums, is_verified || block.checksum.is_some()) => {
                filled.push((*position, *target));
            }
            _ => empty.push(*target),
        }
    }
    slots::give_up(fetch, &empty, true);
    if wrong > 0 {
        peer.counters.blocks_corrupt.add(wrong);
        *channel = None;
        peer.fail(up, "bytes of its blocks do not match their checksums");
    }
    filled
}

/// Record that all parts of a slot are there, with their sums if those are to be trusted.
fn mark(fetch: &Fetch, target: BlockRef, sums: &[u64], is_verified: bool) -> bool {
    let marked = |(part, sum): (usize, &u64)| {
        let sum = [*sum];
        let sum = is_verified.then_some(sum.as_slice());
        fetch.inner.pool.mark_written(part as u32, &[target], sum).is_ok_and(|marked| marked == 1)
    };
    sums.iter().enumerate().all(marked)
}
