//! What an owner does every few seconds: says that it is there, sees whether the store still has what it wrote, and
//! whether the buckets are large enough.

use std::hash::{BuildHasher, Hasher, RandomState};

use pegaflow_engine::{Error, ErrorKind, Result};
use redis::Value;

use super::DirectoryTuning;
use super::names::{
    LAYOUT, Layout, OWNERS, OwnerRecord, mark_key, member_range, number_text, numbers_in, owner_number,
};
use super::store::{Batch, Store, text_of};
use crate::limits::{DIRECTORY_BUCKET_LIFE, DIRECTORY_NUMBERS_MAX, DIRECTORY_OWNERS_LOOKED_AT, DIRECTORY_SAMPLES};

/// What an owner and the store have agreed on. If it changes, everything has to be registered anew.
#[derive(Clone, Debug)]
pub(super) struct Post {
    pub(super) number: u32,
    attempt: u64,
    pub(super) layout: Layout,
    /// The layout before this one, if this owner has used it.
    pub(super) former: Option<Layout>,
    /// Run and mark of each server. A restart changes the one, a flush or loss of data the other.
    marks: Vec<(String, String)>,
    /// Raised when the owner's record had lapsed: others may have cleaned up behind it.
    lapses: u64,
}

impl PartialEq for Post {
    fn eq(&self, other: &Self) -> bool {
        let words = |post: &Self| (post.number, post.layout, post.lapses);
        words(self) == words(other) && self.marks == other.marks
    }
}

impl Post {
    /// Say that the owner is gone, unless another process of the pool has already said that it is there.
    pub(super) fn leave(&self, store: &mut Store, record: &OwnerRecord) -> Result<()> {
        let key = OwnerRecord::key(self.number);
        let mut batch = Batch::default();
        batch.add(&key, &[b"GET", key.as_bytes()]);
        if text_of(&store.demand(&batch)?[0]).is_some_and(|text| text == record.text()) {
            let mut batch = Batch::default();
            batch.add(&key, &[b"DEL", key.as_bytes()]);
            batch.add(OWNERS, &[b"SREM", OWNERS.as_bytes(), number_text(self.number).as_bytes()]);
            store.demand(&batch)?;
        }
        Ok(())
    }
}

/// Any number.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Tell the store, and ask it. `blocks`: how many there are; `samples`: some that are registered.
pub(super) fn beat(
    store: &mut Store,
    record: &OwnerRecord,
    blocks: u64,
    samples: &[u64],
    before: Option<&Post>,
    tuning: &DirectoryTuning,
) -> Result<Post> {
    let marks = look_at_marks(store)?;
    let layout = agree_on_layout(store, blocks)?;
    let is_known = before.is_some_and(|before| before.layout == layout);
    let finer = if is_known { finer_layout(store, layout, samples, tuning.bucket_entries_max)? } else { None };
    let attempt = before.map_or(0, |before| before.attempt);
    let (attempt, number, is_there) = agree_on_number(store, record, attempt)?;
    let (key, text) = (OwnerRecord::key(number), record.text());
    let life_ms = tuning.record_life.as_millis().to_string();
    let mut batch = Batch::default();
    batch.add(&key, &[b"SET", key.as_bytes(), text.as_bytes(), b"PX", life_ms.as_bytes()]);
    batch.add(OWNERS, &[b"SADD", OWNERS.as_bytes(), number_text(number).as_bytes()]);
    batch.add(OWNERS, &[b"EXPIRE", OWNERS.as_bytes(), life().as_bytes()]);
    if let Some(finer) = finer {
        log::info!("pegaflow: the directory's buckets are made finer: two to the power of {}", finer.text());
        batch.add(LAYOUT, &[b"SET", LAYOUT.as_bytes(), finer.text().as_bytes(), b"EX", life().as_bytes()]);
    }
    store.demand(&batch)?;
    forget_dead_owners(store)?;
    let former = before.and_then(|before| if is_known { before.former } else { Some(before.layout) });
    let lapses = before.map_or(0, |before| before.lapses + u64::from(!is_there));
    Ok(Post { number, attempt, layout, former, marks, lapses })
}

/// Look at a few of those that are said to be there. One that comes back names itself again.
fn forget_dead_owners(store: &mut Store) -> Result<()> {
    let mut batch = Batch::default();
    let count = DIRECTORY_OWNERS_LOOKED_AT.to_string();
    batch.add(OWNERS, &[b"SRANDMEMBER", OWNERS.as_bytes(), count.as_bytes()]);
    let some = numbers_in(&store.demand(&batch)?[0]);
    let mut batch = Batch::default();
    for number in &some {
        let key = OwnerRecord::key(*number);
        batch.add(&key, &[b"EXISTS", key.as_bytes()]);
    }
    if batch.is_empty() {
        return Ok(());
    }
    let values = store.demand(&batch)?;
    let mut batch = Batch::default();
    for (number, _) in some.iter().zip(&values).filter(|(_, value)| **value == Value::Int(0)) {
        batch.add(OWNERS, &[b"SREM", OWNERS.as_bytes(), number_text(*number).as_bytes()]);
    }
    if !batch.is_empty() {
        store.demand(&batch)?;
    }
    Ok(())
}

fn life() -> String {
    DIRECTORY_BUCKET_LIFE.as_secs().to_string()
}

fn look_at_marks(store: &mut Store) -> Result<Vec<(String, String)>> {
    let mut batch = Batch::default();
    let mark = format!("{:016x}", random());
    for node in 0..store.nodes() {
        let Some(key) = mark_key(|key| store.node_of(key) == node) else { continue };
        let name = key.as_bytes();
        batch.add(&key, &[b"SET", name, mark.as_bytes(), b"NX", b"EX", life().as_bytes()]);
        batch.add(&key, &[b"GET", name]);
        batch.add(&key, &[b"EXPIRE", name, life().as_bytes()]);
        batch.add(&key, &[b"INFO", b"server"]);
    }
    let values = store.exchange(&batch)?;
    let marks: Result<Vec<(String, String)>> = values
        .chunks_exact(4)
        .map(|values| {
            // INFO may be forbidden; then a restart that loses the last writes only is repaired slowly.
            let info = text_of(&values[3]).unwrap_or_default();
            let run = info.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap_or_default().to_owned();
            Ok((run, text_of(&values[1]).ok_or_else(|| refused(&values[..3]))?))
        })
        .collect();
    // In which order the servers of a cluster are named differs from one to the next.
    marks.map(|mut marks| {
        marks.sort_unstable();
        marks
    })
}

fn agree_on_layout(store: &mut Store, blocks: u64) -> Result<Layout> {
    let wanted = Layout::for_entries(blocks).text();
    let mut batch = Batch::default();
    batch.add(LAYOUT, &[b"SET", LAYOUT.as_bytes(), wanted.as_bytes(), b"NX", b"EX", life().as_bytes()]);
    batch.add(LAYOUT, &[b"GET", LAYOUT.as_bytes()]);
    batch.add(LAYOUT, &[b"EXPIRE", LAYOUT.as_bytes(), life().as_bytes()]);
    let values = store.exchange(&batch)?;
    let text = text_of(&values[1]).ok_or_else(|| refused(&values))?;
    Layout::parse(text.as_bytes()).ok_or_else(|| {
        let sentence = format!("the directory's {LAYOUT} is {text:?}, which no version of this writes: delete the key");
        Error::new(ErrorKind::Refused, sentence)
    })
}

fn refused(values: &[Value]) -> Error {
    let refusal = values.iter().find_map(|value| match value {
        Value::ServerError(refusal) => Some(refusal.to_string()),
        _ => None,
    });
    let why = refusal.unwrap_or_else(|| "a key is gone as soon as it is written".into());
    Error::new(ErrorKind::Device, format!("the directory's server cannot be written to: {why}"))
}

/// Finer buckets, if these have become too full of different blocks.
fn finer_layout(store: &mut Store, layout: Layout, samples: &[u64], entries_max: u32) -> Result<Option<Layout>> {
    if samples.len() < DIRECTORY_SAMPLES {
        return Ok(None);
    }
    let mut batch = Batch::default();
    for hash in samples {
        let (key, [low, high]) = (layout.bucket_key(*hash), member_range(*hash));
        batch.add(&key, &[b"ZCARD", key.as_bytes()]);
        batch.add(&key, &[b"ZLEXCOUNT", key.as_bytes(), &low, &high]);
    }
    let (mut entries, mut alike) = (0, 0);
    for values in store.demand(&batch)?.chunks_exact(2) {
        if let [Value::Int(all), Value::Int(same)] = values {
            entries += all;
            alike += same;
        }
    }
    let full = i64::from(entries_max) * samples.len() as i64;
    // Entries of one block stay together, however fine the buckets are.
    let helps = alike < full / 2;
    Ok(if entries > full && helps { layout.finer() } else { None })
}

/// The first number of this pool that no other pool has, and whether the store knew that we have it.
fn agree_on_number(store: &mut Store, record: &OwnerRecord, first: u64) -> Result<(u64, u32, bool)> {
    for attempt in first..first + DIRECTORY_NUMBERS_MAX {
        let number = owner_number(record.pool_id, attempt);
        let key = OwnerRecord::key(number);
        let mut batch = Batch::default();
        batch.add(&key, &[b"GET", key.as_bytes()]);
        match &store.demand(&batch)?[0] {
            Value::Nil => return Ok((attempt, number, false)),
            Value::BulkString(text)
                if OwnerRecord::parse(text).is_some_and(|other| other.pool_id == record.pool_id) =>
            {
                return Ok((attempt, number, true));
            }
            _ => {}
        }
    }
    Err(Error::new(ErrorKind::Full, "the directory has no number left for this pool: is it full of something else?"))
}
