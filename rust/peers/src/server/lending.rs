//! One lease: blocks in memory, and before them what has to come from SSD.

use std::time::{Duration, Instant};

use pegaflow_engine::limits::SSD_REQUEST_KEYS_MAX;
use pegaflow_engine::tier::Tier;
use pegaflow_engine::{Error, Key, Lent, Namespace};
use tonic::Status;

use super::leases::SessionId;
use super::service::{Term, lease_time_ms, status};
use crate::limits::{LEASE_BYTES_MAX, LEASE_WAIT_MAX, LEASE_WAIT_PAUSE};
use crate::proto;

/// Lease what there is of `keys`, as far as there is room. A lease of nothing has number 0.
pub(crate) async fn lend(
    term: &Term,
    session: SessionId,
    name: ([u8; 32], u32, &[u64]),
    keys: &[Key],
    parent: Option<Key>,
    request: &proto::LeaseRequest,
) -> Result<proto::LeaseReply, Status> {
    let (fingerprint, group, part_bytes) = name;
    let found = term.pool.find_namespace(&fingerprint, group, part_bytes).map_err(status)?;
    let (Some(ns), Some(question)) = (found, &request.question) else { return Ok(proto::LeaseReply::default()) };
    let block_bytes: u64 = part_bytes.iter().sum();
    let wanted = request.bytes_max.min(LEASE_BYTES_MAX).min(block_bytes.saturating_mul(keys.len() as u64));
    let claim = term.leases.claim(session, wanted);
    let count_max = (claim.bytes() / block_bytes.max(1)) as usize;
    if count_max == 0 {
        term.counters.leases_refused.add(u64::from(wanted > 0));
        return Ok(proto::LeaseReply::default());
    }
    let wait = Duration::from_millis(u64::from(request.wait_ms)).min(LEASE_WAIT_MAX);
    bring(term, ns, (&keys[..keys.len().min(count_max)], parent, question.chained), wait).await.map_err(status)?;
    let lent = term.pool.lend(ns, keys, question.chained, claim.bytes()).map_err(status)?;
    if lent.is_empty() {
        return Ok(proto::LeaseReply::default());
    }
    let blocks = lent.iter().map(|(position, block)| described(*position, block)).collect();
    let given = term.leases.give(session, lent.into_iter().map(|(_, block)| block).collect(), claim).map_err(status)?;
    let (lease, secret, time_ms) = (given.number, given.secret.to_vec(), lease_time_ms());
    Ok(proto::LeaseReply { lease, secret, time_ms, blocks, digest: 0 })
}

fn described(position: usize, block: &Lent) -> proto::LeasedBlock {
    let place = |place: pegaflow_engine::LentPlace| proto::Place { segment: place.segment, offset: place.offset };
    let parts = block.places().map(place).collect();
    proto::LeasedBlock { key: position as u32, used_bytes: 0, checksum: block.checksum(), parts }
}

/// Have what is on SSD brought into memory, and wait for it.
async fn bring(
    term: &Term,
    ns: Namespace,
    (keys, parent, chained): (&[Key], Option<Key>, bool),
    wait: Duration,
) -> Result<(), Error> {
    if wait.is_zero() {
        return Ok(());
    }
    let tiers = term.pool.tiers(ns, keys)?;
    let Some(first) = tiers.iter().position(|tier| *tier != Tier::Memory) else { return Ok(()) };
    let parent = if first == 0 { parent } else { Some(keys[first - 1]) };
    let is_on_ssd = |tier: &Tier| *tier == Tier::Ssd;
    if chained && !is_on_ssd(&tiers[first]) || !tiers.iter().any(is_on_ssd) {
        return Ok(());
    }
    let asked = &keys[first..keys.len().min(first + SSD_REQUEST_KEYS_MAX)];
    let Some(prefetch) = term.pool.prefetch(ns, asked, parent, chained)? else { return Ok(()) };
    let until = Instant::now() + wait;
    while prefetch.poll().is_none() && Instant::now() < until {
        tokio::time::sleep(LEASE_WAIT_PAUSE).await;
    }
    let brought = prefetch.found();
    let known = tiers[first..].iter().take(asked.len()).filter(|tier| **tier == Tier::Memory).count();
    term.counters.blocks_from_ssd.add(brought.saturating_sub(known) as u64);
    Ok(())
}
