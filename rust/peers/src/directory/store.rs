//! Connections to the servers of a store, and many commands in one round trip.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pegaflow_engine::{Error, ErrorKind, Result};
use redis::{Client, Connection, ServerErrorKind, Value};

use super::slots::{SLOTS, slot_of};
use super::url::{Arrangement, DirectoryUrl};
use crate::limits::{
    DIRECTORY_CONNECT_ALL_TIME_MAX, DIRECTORY_CONNECT_TIME_MAX, DIRECTORY_NODES_MAX, DIRECTORY_REDIRECTIONS_MAX,
};

/// Commands, packed one behind the other.
#[derive(Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    /// Slot of the key, and end of the command in `bytes`.
    commands: Vec<(u16, usize)>,
}

impl Batch {
    /// Add a command on `key`, which decides where it goes even if it is none of the words.
    pub(super) fn add(&mut self, key: &str, words: &[&[u8]]) {
        self.bytes.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
        for word in words {
            self.bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            self.bytes.extend_from_slice(word);
            self.bytes.extend_from_slice(b"\r\n");
        }
        self.commands.push((slot_of(key.as_bytes()), self.bytes.len()));
    }

    fn command(&self, position: usize) -> &[u8] {
        let start = position.checked_sub(1).map_or(0, |before| self.commands[before].1);
        &self.bytes[start..self.commands[position].1]
    }

    pub(super) fn len(&self) -> usize {
        self.commands.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }
}

struct Node {
    address: (String, u16),
    connection: Connection,
}

/// All servers that hold a part of a store, connected. After any error it is dropped and made anew: replies might be
/// out of step, or another server in charge.
pub(super) struct Store {
    url: DirectoryUrl,
    /// How long a reply may take.
    patience: Duration,
    nodes: Vec<Node>,
    /// Node of each slot; empty if there is one node.
    node_of_slot: Vec<u16>,
}

impl Store {
    /// Find the servers and connect. `patience`: how long a reply may take later. Hosts of the URL that were asked are
    /// put behind the others: if what one of them leads to fails, the next is asked first, and not the same again.
    pub(super) fn connect(url: &mut DirectoryUrl, patience: Duration) -> Result<Self> {
        if url.is_tls() {
            // An error says that the process has one already, which is as good.
            let _installed = rustls::crypto::ring::default_provider().install_default();
        }
        let deadline = Instant::now() + DIRECTORY_CONNECT_ALL_TIME_MAX;
        let servers = url.clone();
        let alone = || Self { url: servers.clone(), patience, nodes: Vec::new(), node_of_slot: Vec::new() };
        match &servers.arrangement {
            Arrangement::Single => {
                let mut store = alone();
                let (host, port) = &servers.hosts[0];
                store.add_node(host, *port, deadline)?;
                Ok(store)
            }
            Arrangement::Sentinel(name) => first_that_leads(
                &mut url.hosts,
                deadline,
                |host, port| master_by(&servers, host, port, name, deadline),
                |(host, port)| {
                    let mut store = alone();
                    let node = store.add_node(host, *port, deadline)?;
                    let role = ask(&mut store.nodes[node].connection, &[b"ROLE"])?;
                    if role.first().is_some_and(|role| is_text(role, "master")) {
                        return Ok(store);
                    }
                    Err(unusable(host, *port, "is not the master any more"))
                },
            ),
            Arrangement::Cluster => first_that_leads(
                &mut url.hosts,
                deadline,
                |host, port| ranges_by(&servers, host, port, deadline),
                |ranges| {
                    let mut store = alone();
                    store.add_ranges(ranges, deadline)?;
                    Ok(store)
                },
            ),
        }
    }

    fn add_node(&mut self, host: &str, port: u16, deadline: Instant) -> Result<usize> {
        let known = self.nodes.iter().position(|node| node.address.0 == host && node.address.1 == port);
        if let Some(known) = known {
            return Ok(known);
        }
        if self.nodes.len() >= DIRECTORY_NODES_MAX {
            return Err(unusable(host, port, "belongs to a cluster of too many masters"));
        }
        let connection = connect_to(&self.url, host, port, false, deadline)?;
        let address = (host.to_owned(), port);
        let set = connection.set_read_timeout(Some(self.patience));
        set.and_then(|()| connection.set_write_timeout(Some(self.patience)))
            .map_err(|error| failed(&address, &error))?;
        self.nodes.push(Node { address, connection });
        Ok(self.nodes.len() - 1)
    }

    fn add_ranges(&mut self, ranges: &[SlotRange], deadline: Instant) -> Result<()> {
        let mut node_of_slot = vec![0; SLOTS];
        for range in ranges {
            let node = self.add_node(&range.host, range.port, deadline)? as u16;
            node_of_slot[range.first..=range.last].fill(node);
        }
        self.node_of_slot = node_of_slot;
        Ok(())
    }

    /// How many servers there are.
    pub(super) fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Which of the servers a key is on.
    pub(super) fn node_of(&self, key: &str) -> usize {
        self.node_of_slot.get(usize::from(slot_of(key.as_bytes()))).map_or(0, |node| usize::from(*node))
    }

    /// Send all commands, then read the replies, in their order. A refusal by a server is a reply.
    pub(super) fn exchange(&mut self, batch: &Batch) -> Result<Vec<Value>> {
        let mut values = vec![Value::Nil; batch.len()];
        if let [node] = &mut self.nodes[..] {
            node.connection.send_packed_command(&batch.bytes).map_err(|error| failed(&node.address, &error))?;
            for value in &mut values {
                *value = node.receive()?;
            }
        } else {
            self.exchange_with_all(batch, &mut values)?;
        }
        if !self.node_of_slot.is_empty() {
            self.ask_where_slots_go(batch, &mut values)?;
            let moved = values
                .iter_mut()
                .enumerate()
                .filter_map(|(at, value)| redirection(value).filter(|way| way.is_for_good).map(|way| (at, value, way)));
            for (position, value, way) in moved.take(DIRECTORY_REDIRECTIONS_MAX) {
                *value = self.follow(batch, position, &way)?;
            }
        }
        Ok(values)
    }

    fn exchange_with_all(&mut self, batch: &Batch, values: &mut [Value]) -> Result<()> {
        let mut shares: Vec<(Vec<u8>, Vec<usize>)> = vec![Default::default(); self.nodes.len()];
        let mut start = 0;
        for (position, (slot, end)) in batch.commands.iter().enumerate() {
            let (bytes, positions) = &mut shares[usize::from(self.node_of_slot[usize::from(*slot)])];
            bytes.extend_from_slice(&batch.bytes[start..*end]);
            positions.push(position);
            start = *end;
        }
        for (node, (bytes, _)) in self.nodes.iter_mut().zip(&shares).filter(|(_, (bytes, _))| !bytes.is_empty()) {
            node.connection.send_packed_command(bytes).map_err(|error| failed(&node.address, &error))?;
        }
        for (node, (_, positions)) in self.nodes.iter_mut().zip(&shares) {
            for position in positions {
                values[*position] = node.receive()?;
            }
        }
        Ok(())
    }

    /// The server that a reply to a command names.
    fn node_named(&mut self, batch: &Batch, position: usize, way: &Redirection) -> Result<usize> {
        let slot = usize::from(batch.commands[position].0);
        let asked = &self.nodes[usize::from(self.node_of_slot[slot])].address.0;
        let host = if way.host.is_empty() { asked.clone() } else { way.host.clone() };
        self.add_node(&host, way.port, Instant::now() + DIRECTORY_CONNECT_TIME_MAX)
    }

    /// Slots are being moved, and keys of theirs are there already: give the commands to the servers that the replies
    /// name, all that are for the same one in one round trip.
    fn ask_where_slots_go(&mut self, batch: &Batch, values: &mut [Value]) -> Result<()> {
        let mut shares: BTreeMap<usize, (Vec<u8>, Vec<usize>)> = BTreeMap::new();
        for (position, value) in values.iter().enumerate() {
            let Some(way) = redirection(value).filter(|way| !way.is_for_good) else { continue };
            let (bytes, positions) = shares.entry(self.node_named(batch, position, &way)?).or_default();
            bytes.extend_from_slice(b"*1\r\n$6\r\nASKING\r\n");
            bytes.extend_from_slice(batch.command(position));
            positions.push(position);
        }
        for (node, (bytes, _)) in &shares {
            let node = &mut self.nodes[*node];
            node.connection.send_packed_command(bytes).map_err(|error| failed(&node.address, &error))?;
        }
        for (node, (_, positions)) in &shares {
            for position in positions {
                self.nodes[*node].receive()?;
                values[*position] = self.nodes[*node].receive()?;
            }
        }
        Ok(())
    }

    /// A slot has been moved: give the command to the server that a reply names. What that one says holds.
    fn follow(&mut self, batch: &Batch, position: usize, way: &Redirection) -> Result<Value> {
        let node = self.node_named(batch, position, way)?;
        self.node_of_slot[usize::from(batch.commands[position].0)] = node as u16;
        let node = &mut self.nodes[node];
        let sent = node.connection.send_packed_command(batch.command(position));
        sent.map_err(|error| failed(&node.address, &error))?;
        node.receive()
    }

    /// [`Self::exchange`] for commands of which none may be refused.
    pub(super) fn demand(&mut self, batch: &Batch) -> Result<Vec<Value>> {
        let values = self.exchange(batch)?;
        for (value, (slot, _)) in values.iter().zip(&batch.commands) {
            if let Value::ServerError(refusal) = value {
                let node = self.node_of_slot.get(usize::from(*slot)).map_or(0, |node| usize::from(*node));
                let (host, port) = &self.nodes[node].address;
                return Err(unusable(host, *port, &format!("refuses a command ({refusal})")));
            }
        }
        Ok(values)
    }
}

/// Who else is to be given a command.
struct Redirection {
    /// Empty: the same as was asked.
    host: String,
    port: u16,
    /// Not for this command alone.
    is_for_good: bool,
}

fn redirection(value: &Value) -> Option<Redirection> {
    let Value::ServerError(refusal) = value else { return None };
    let is_for_good = match refusal.kind()? {
        ServerErrorKind::Moved => true,
        ServerErrorKind::Ask => false,
        _ => return None,
    };
    let (_slot, address) = refusal.details()?.split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    // As it is in `slot_range`.
    let host = if host == "?" { "" } else { host };
    Some(Redirection { host: host.to_owned(), port: port.parse().ok()?, is_for_good })
}

impl Node {
    fn receive(&mut self) -> Result<Value> {
        self.connection.recv_response().map_err(|error| failed(&self.address, &error))
    }
}

#[derive(PartialEq)]
struct SlotRange {
    first: usize,
    last: usize,
    host: String,
    port: u16,
}

fn connect_to(url: &DirectoryUrl, host: &str, port: u16, is_sentinel: bool, deadline: Instant) -> Result<Connection> {
    let time_max = deadline.saturating_duration_since(Instant::now()).min(DIRECTORY_CONNECT_TIME_MAX);
    if time_max.is_zero() {
        return Err(unusable(host, port, "was not reached: others took too long to answer"));
    }
    let info = url.connection(host, port, is_sentinel)?;
    let connected = Client::open(info).and_then(|client| client.get_connection_with_timeout(time_max));
    let connection = connected.map_err(|error| failed(&(host.to_owned(), port), &error))?;
    let set = connection.set_read_timeout(Some(time_max));
    set.map_err(|error| failed(&(host.to_owned(), port), &error))?;
    Ok(connection)
}

/// What a command answers.
fn ask_value(connection: &mut Connection, words: &[&[u8]]) -> Result<Value> {
    let mut batch = Batch::default();
    batch.add("", words);
    let sent = connection.send_packed_command(&batch.bytes).and_then(|()| connection.recv_response());
    sent.map_err(|error| Error::new(ErrorKind::Device, format!("the directory's server does not answer: {error}")))
}

/// Items of the array that a command answers.
fn ask(connection: &mut Connection, words: &[&[u8]]) -> Result<Vec<Value>> {
    match ask_value(connection, words)? {
        Value::Array(items) => Ok(items),
        other => Err(Error::new(ErrorKind::Device, format!("the directory's server answers {}", kind_of(&other)))),
    }
}

fn kind_of(value: &Value) -> String {
    match value {
        Value::ServerError(refusal) => refusal.to_string(),
        Value::Nil => "that it knows none of that name".into(),
        _ => "something that is no list".into(),
    }
}

/// Where the first host sends us whose word is any good: some may be behind the times. What several say is tried once.
/// If there is none, what was wrong with the last. Each host that is asked is put behind the others,
/// and none is after the deadline: so a later call goes on where this one had to stop.
fn first_that_leads<T: PartialEq, S>(
    hosts: &mut [(String, u16)],
    deadline: Instant,
    question: impl Fn(&str, u16) -> Result<T>,
    follow: impl Fn(&T) -> Result<S>,
) -> Result<S> {
    let mut last = Error::new(ErrorKind::InvalidArgument, "the directory's URL names no host");
    let mut tried = Vec::new();
    for _ in 0..hosts.len() {
        hosts.rotate_left(1);
        let Some((host, port)) = hosts.last() else { break };
        match question(host, *port) {
            Ok(answer) if tried.contains(&answer) => {}
            Ok(answer) => match follow(&answer) {
                Ok(store) => return Ok(store),
                Err(error) => {
                    last = error;
                    tried.push(answer);
                }
            },
            Err(error) => last = error,
        }
        if Instant::now() >= deadline {
            break;
        }
    }
    Err(last)
}

/// Whom a sentinel says to be the master.
fn master_by(url: &DirectoryUrl, host: &str, port: u16, name: &str, deadline: Instant) -> Result<(String, u16)> {
    let mut connection = connect_to(url, host, port, true, deadline)?;
    let answer = ask(&mut connection, &[b"SENTINEL", b"get-master-addr-by-name", name.as_bytes()])?;
    let [master, master_port] = &answer[..] else { return Err(unusable(host, port, "knows no master of that name")) };
    let found = text_of(master).zip(text_of(master_port).and_then(|port| port.parse().ok()));
    found.ok_or_else(|| unusable(host, port, "names a master that cannot be read"))
}

/// Which masters hold which slots, as one node of a cluster knows it. One that is cut off from the others knows them
/// all, refuses all commands on keys, and says so.
fn ranges_by(url: &DirectoryUrl, host: &str, port: u16, deadline: Instant) -> Result<Vec<SlotRange>> {
    let mut connection = connect_to(url, host, port, false, deadline)?;
    let info = ask_value(&mut connection, &[b"CLUSTER", b"INFO"])?;
    if let Value::ServerError(_) = info {
        return Err(unusable(host, port, &format!("answers {}", kind_of(&info))));
    }
    if !text_of(&info).is_some_and(|info| info.lines().any(|line| line == "cluster_state:ok")) {
        return Err(unusable(host, port, "takes its cluster for down, or belongs to none"));
    }
    let answer = ask(&mut connection, &[b"CLUSTER", b"SLOTS"])?;
    let ranges = answer.iter().map(|item| slot_range(item, host)).collect::<Option<Vec<_>>>();
    let mut ranges =
        ranges.ok_or_else(|| unusable(host, port, "describes its cluster in a way that cannot be read"))?;
    // In any order, and to be compared with what others say.
    ranges.sort_unstable_by_key(|range| range.first);
    let end = ranges.iter().try_fold(0, |end, range| (range.first <= end).then_some(end.max(range.last + 1)));
    if end != Some(SLOTS) {
        return Err(unusable(host, port, "belongs to a cluster of which slots are missing"));
    }
    Ok(ranges)
}

fn slot_range(item: &Value, asked: &str) -> Option<SlotRange> {
    let Value::Array(fields) = item else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &fields[..] else { return None };
    let [host, Value::Int(port), ..] = &master[..] else { return None };
    // A node that does not know its own address leaves it out.
    let host = text_of(host).filter(|host| !host.is_empty() && host != "?").unwrap_or_else(|| asked.to_owned());
    let (first, last) = (usize::try_from(*first).ok()?, usize::try_from(*last).ok().filter(|last| *last < SLOTS)?);
    (first <= last).then_some(SlotRange { first, last, host, port: u16::try_from(*port).ok()? })
}

/// Text of a reply.
pub(super) fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}

fn is_text(value: &Value, text: &str) -> bool {
    text_of(value).is_some_and(|value| value == text)
}

fn failed(address: &(String, u16), error: &redis::RedisError) -> Error {
    unusable(&address.0, address.1, &format!("does not answer ({error})"))
}

fn unusable(host: &str, port: u16, what: &str) -> Error {
    Error::new(ErrorKind::Device, format!("the directory's server {host}:{port} {what}"))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn after_the_deadline_no_host_is_asked_and_the_next_call_goes_on_behind_the_last() {
        let mut hosts: Vec<(String, u16)> = (1..=4).map(|port| ("h".to_owned(), port)).collect();
        let asked = RefCell::new(Vec::new());
        let mut lead = |deadline: Instant, slow: u16, good: u16| {
            let question = |_: &str, port: u16| {
                asked.borrow_mut().push(port);
                while port == slow && Instant::now() < deadline {
                    std::thread::yield_now();
                }
                Ok(port)
            };
            let follow = |port: &u16| if *port == good { Ok(*port) } else { Err(unusable("h", *port, "is bad")) };
            first_that_leads(&mut hosts, deadline, question, follow)
        };
        assert!(lead(Instant::now(), 0, 0).is_err());
        let soon = Instant::now() + Duration::from_secs(1);
        assert!(lead(soon, 2, 4).is_err());
        let late = Instant::now() + Duration::from_secs(3600);
        assert_eq!(lead(late, 0, 4).unwrap(), 4);
        assert_eq!(lead(late, 0, 1).unwrap(), 1);
        assert!(lead(late, 0, 0).is_err());
        assert_eq!(*asked.borrow(), [1, 2, 3, 4, 1, 2, 3, 4, 1]);
    }

    #[test]
    fn a_reply_that_knows_no_host_means_the_one_that_was_asked() {
        for (reply, host, is_for_good) in [
            ("MOVED 5 ?:7", "", true),
            ("ASK 5 :7", "", false),
            ("MOVED 5 ::1:7", "::1", true),
            ("ASK 5 h:7", "h", false),
        ] {
            let value = redis::parse_redis_value(format!("-{reply}\r\n").as_bytes()).unwrap();
            let way = redirection(&value).unwrap();
            assert_eq!((way.host.as_str(), way.port, way.is_for_good), (host, 7, is_for_good));
        }
        assert!(redirection(&redis::parse_redis_value(b"-ERR 5 h:7\r\n").unwrap()).is_none());
    }

    #[test]
    fn nobody_is_called_after_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let url = DirectoryUrl::parse("redis+cluster://h").unwrap();
        let error = connect_to(&url, "127.0.0.1", port, false, Instant::now()).err().unwrap();
        assert!(error.to_string().contains("was not reached"), "{error}");
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err());
    }
}
