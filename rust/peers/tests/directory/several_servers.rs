//! Servers behind sentinels, and clusters: masters die and freeze, slots move, and some have not heard of it.
//! `PEGAFLOW_DIRECTORY_FAILOVERS` says how many failovers each of the two go through, one unless it is set.

use std::collections::BTreeSet;
use std::sync::Arc;

use pegaflow_peers::directory::{Directory, DirectoryTuning};
use redis::Value;

use crate::blocks::Blocks;
use crate::server::{Server, ask};
use crate::talk::{ADDRESS, asker, block, find, hasty, is_complete, named, open, until, until_found};

/// So long may a server be silent before others take it for dead, in milliseconds, where one is to die.
const SILENCE_MS: &str = "1000";
/// And where none is: longer than any busy machine keeps a server from answering.
const LONG_SILENCE_MS: &str = "15000";
const BLOCKS: u64 = 50_000;
/// Of these, the first that change all the time.
const CHANGING: u64 = 10_000;

/// Whether a server says that this is its part. Sentinels cut off whoever asks while they change it.
fn is(server: &Server, part: &str) -> bool {
    let connection = redis::Client::open(server.url()).and_then(|client| client.get_connection());
    match connection.and_then(|mut connection| ask(&mut connection, "ROLE")) {
        Ok(Value::Array(words)) => words.first() == Some(&Value::BulkString(part.into())),
        _ => false,
    }
}

fn ask_text(server: &Server, words: &str) -> String {
    redis::from_redis_value(ask(&mut server.connect(), words).unwrap()).unwrap()
}

fn watch(sentinel: &Server, master: &Server, quorum: usize) {
    let mut connection = sentinel.connect();
    ask(&mut connection, &format!("SENTINEL MONITOR main 127.0.0.1 {} {quorum}", master.port)).unwrap();
    ask(&mut connection, &format!("SENTINEL SET main down-after-milliseconds {SILENCE_MS}")).unwrap();
    ask(&mut connection, "SENTINEL SET main failover-timeout 5000").unwrap();
}

/// A server and two replicas, and three sentinels that know of each other and of all of them.
fn watched() -> (Vec<Server>, Vec<Server>) {
    let mut servers = vec![Server::start(&[])];
    let master = servers[0].port.to_string();
    servers.extend((0..2).map(|_| Server::start(&["--replicaof", "127.0.0.1", &master])));
    // What a sentinel does not see at once it sees ten seconds later.
    until("replicas that are up to date", || {
        ask_text(&servers[0], "INFO replication").matches("state=online").count() == 2
    });
    let sentinels: Vec<Server> = (0..3).map(|_| Server::start(&["--sentinel"])).collect();
    sentinels.iter().for_each(|sentinel| watch(sentinel, &servers[0], 2));
    until("sentinels know of each other and of the replicas", || {
        let count = |sentinel: &Server, what: &str| match ask(&mut sentinel.connect(), what) {
            Ok(Value::Array(all)) => all.len(),
            other => panic!("{other:?}"),
        };
        let knows = |sentinel| [count(sentinel, "SENTINEL REPLICAS main"), count(sentinel, "SENTINEL SENTINELS main")];
        sentinels.iter().all(|sentinel| knows(sentinel) == [2, 2])
    });
    (servers, sentinels)
}

/// Which of the servers the sentinels agree on.
fn master_of(servers: &[Server], sentinels: &[Server]) -> Option<usize> {
    let named = |sentinel: &Server| {
        let said = ask(&mut sentinel.connect(), "SENTINEL GET-MASTER-ADDR-BY-NAME main").ok()?;
        let (_, port): (String, u16) = redis::from_redis_value(said).ok()?;
        servers.iter().position(|server| server.port == port)
    };
    let first = named(&sentinels[0]);
    first.filter(|_| sentinels.iter().all(|sentinel| named(sentinel) == first))
}

/// Wait until something is there.
fn awaited<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let mut found = None;
    until(what, || {
        found = look();
        found.is_some()
    });
    found.unwrap()
}

/// Which of two servers is master, if the other one is its replica and up to date. A busy machine may have made it so.
fn pair(servers: &[Server], one: usize, other: usize) -> Option<(usize, usize)> {
    let is_replica = |at: usize| {
        is(&servers[at], "slave") && ask_text(&servers[at], "INFO replication").contains("master_link_status:up")
    };
    let fits = |(master, replica): &(usize, usize)| is(&servers[*master], "master") && is_replica(*replica);
    [(one, other), (other, one)].into_iter().find(fits)
}

/// Servers of a cluster, with all slots divided among the first so many of them.
fn cluster(masters: usize, all: usize, silence_ms: &str) -> Vec<Server> {
    let arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", silence_ms];
    let servers: Vec<Server> = (0..all).map(|_| Server::start(&arguments)).collect();
    for (at, server) in servers.iter().enumerate() {
        let mut connection = server.connect();
        ask(&mut connection, &format!("CLUSTER SET-CONFIG-EPOCH {}", at + 1)).unwrap();
        if at < masters {
            let slots = 16_384 * at / masters..16_384 * (at + 1) / masters;
            let slots: String = slots.map(|slot| format!(" {slot}")).collect();
            ask(&mut connection, &format!("CLUSTER ADDSLOTS{slots}")).unwrap();
        }
        ask(&mut connection, &format!("CLUSTER MEET 127.0.0.1 {}", servers[0].port)).unwrap();
    }
    until("a whole cluster", || {
        let knows_all = |server| ask_text(server, "CLUSTER NODES").lines().count() == all;
        servers.iter().all(|one| ask_text(one, "CLUSTER INFO").contains("cluster_state:ok") && knows_all(one))
    });
    servers
}

fn cluster_url<'a>(servers: impl IntoIterator<Item = &'a Server>) -> String {
    let hosts: Vec<String> = servers.into_iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
    format!("redis+cluster://{}", hosts.join(","))
}

/// Owner and asker of so many blocks, all of which are registered and found.
fn registered(url: &str, count: u64, tuning: DirectoryTuning) -> (Arc<Blocks>, Directory, Directory) {
    let blocks = Arc::new(Blocks::new(1, count as usize));
    blocks.fill((0..count).map(block));
    let owner = open(&blocks, url, tuning);
    owner.announce(Some(ADDRESS)).unwrap();
    until("registrations", || is_complete(&owner));
    let asker = asker(url);
    until_found("everything is found", &asker, (0..count).map(block));
    (blocks, owner, asker)
}

fn failovers() -> usize {
    std::env::var("PEGAFLOW_DIRECTORY_FAILOVERS").map_or(1, |text| text.parse().unwrap())
}

/// Kill a master, or, every other time, have it stand still.
fn strike(master: &mut Server, number: usize) -> &'static str {
    if number.is_multiple_of(2) {
        master.kill();
        return "master killed";
    }
    master.signal("-STOP");
    "master frozen"
}

/// Have it come back: empty, or as if nothing had been.
fn heal(master: &mut Server, number: usize) {
    if number.is_multiple_of(2) {
        master.restart();
    } else {
        master.signal("-CONT");
    }
}

/// What has to come about after a failover: everything is registered anew and found, and nothing else.
fn comes_back(fault: &str, owner: &Directory, asker: &Directory, before: u64) {
    let is_done = || owner.owner_facts().is_some_and(|facts| facts.anew > before && facts.complete);
    println!("{fault}: everything is registered again {:?} after the promotion", until(fault, is_done));
    println!("... and found after another {:?}", until_found(fault, asker, (CHANGING..BLOCKS).map(block)));
    let never: Vec<u64> = (1 << 40..(1 << 40) + 2000).map(block).collect();
    assert!(named(asker, &never).is_empty(), "what nobody ever had is not named");
}

#[test]
fn after_failovers_by_sentinels_under_load_everything_is_registered_again() {
    let (mut servers, sentinels) = watched();
    let hosts: Vec<String> = sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port)).collect();
    let url = format!("redis+sentinel://{}/main", hosts.join(","));
    let (blocks, owner, asker) = registered(&url, BLOCKS, DirectoryTuning::default());
    blocks.under_load(CHANGING as usize, || {
        for number in 0..failovers() {
            let master = awaited("sentinels agree", || {
                master_of(&servers, &sentinels).filter(|master| is(&servers[*master], "master"))
            });
            let before = owner.owner_facts().unwrap().anew;
            let fault = strike(&mut servers[master], number);
            let promoted = until("another master", || {
                let now = master_of(&servers, &sentinels);
                now.is_some_and(|now| now != master && is(&servers[now], "master"))
            });
            println!("{fault}: another one is master after {promoted:?}");
            comes_back(fault, &owner, &asker, before);
            heal(&mut servers[master], number);
            if number + 1 < failovers() {
                until("the former master is a replica", || is(&servers[master], "slave"));
            }
            until_found("it is not taken for the master", &asker, (CHANGING..BLOCKS).map(block));
        }
    });
}

#[test]
fn after_failovers_in_a_cluster_under_load_everything_is_registered_again() {
    let mut servers = cluster(3, 4, SILENCE_MS);
    let master = ask_text(&servers[0], "CLUSTER MYID");
    ask(&mut servers[3].connect(), &format!("CLUSTER REPLICATE {master}")).unwrap();
    until("a replica that is up to date", || pair(&servers, 0, 3).is_some());
    let (blocks, owner, asker) = registered(&cluster_url(&servers), BLOCKS, DirectoryTuning::default());
    blocks.under_load(CHANGING as usize, || {
        for number in 0..failovers() {
            let (master, replica) = awaited("a master and its replica", || pair(&servers, 0, 3));
            let before = owner.owner_facts().unwrap().anew;
            let fault = strike(&mut servers[master], number);
            let promoted = until("another master", || is(&servers[replica], "master"));
            println!("{fault}: its replica is master after {promoted:?}");
            comes_back(fault, &owner, &asker, before);
            heal(&mut servers[master], number);
            if number + 1 < failovers() {
                until("the former master is a replica", || pair(&servers, replica, master).is_some());
            }
            until_found("it is not taken for the master", &asker, (CHANGING..BLOCKS).map(block));
        }
    });
}

#[test]
fn a_cluster_is_used_as_a_whole_and_a_server_that_lost_its_part_gets_it_again() {
    let mut servers = cluster(3, 3, LONG_SILENCE_MS);
    let stranger = Server::start(&["--cluster-enabled", "yes"]);
    // The first belongs to no cluster (any more).
    let url = cluster_url([&stranger, &servers[1], &servers[0]]);
    let (_blocks, _owner, asker) = registered(&url, 5000, hasty());
    assert!(servers.iter().all(|server| !server.keys("pega1:12:").is_empty()), "all servers have buckets");
    servers[2].restart();
    ask(&mut servers[1].connect(), "FLUSHALL").unwrap();
    until_found("everything is found again", &asker, (0..5000).map(block));
}

#[test]
fn a_server_that_is_cut_off_from_its_cluster_is_passed_over() {
    let servers = cluster(3, 3, LONG_SILENCE_MS);
    // It has the place and the slots of the first in its own eyes, knows all of them, and reaches none of the others.
    let known = ask_text(&servers[0], "CLUSTER NODES");
    let bus = |server: &Server| format!("@{}", server.port + 10_000);
    let known = servers.iter().fold(known, |known, server| known.replace(&bus(server), "@1"));
    let config = std::env::temp_dir().join(format!("pega-directory-cut-off-{}.conf", std::process::id()));
    std::fs::write(&config, known).unwrap();
    let path = config.to_str().unwrap();
    let arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", SILENCE_MS, "--cluster-config-file", path];
    let cut_off = Server::start(&arguments);
    until("it says which slots are where, and that it is down", || {
        let says = ask_text(&cut_off, "CLUSTER INFO");
        // Suspects or certain, as the server's kind goes about it.
        let is_blind = !says.contains("cluster_slots_ok:16384\r\n");
        is_blind && says.contains("cluster_state:fail") && says.contains("cluster_slots_assigned:16384")
    });
    registered(&cluster_url([&cut_off, &servers[1]]), 3000, hasty());
    drop(cut_off);
    std::fs::remove_file(config).unwrap();
}

#[test]
fn if_the_master_of_one_sentinel_takes_no_writes_the_next_sentinel_is_asked() {
    let (alone, master) = (Server::start(&["--min-replicas-to-write", "1"]), Server::start(&[]));
    let sentinels = [Server::start(&["--sentinel"]), Server::start(&["--sentinel"])];
    watch(&sentinels[0], &alone, 1);
    watch(&sentinels[1], &master, 1);
    let url = format!("redis+sentinel://127.0.0.1:{},127.0.0.1:{}/main", sentinels[0].port, sentinels[1].port);
    let blocks = Arc::new(Blocks::new(1, 100));
    blocks.fill((0..100).map(block));
    let owner = open(&blocks, &url, hasty());
    owner.announce(Some(ADDRESS)).unwrap();
    until("registrations", || is_complete(&owner));
    assert!(!master.keys("pega1:12:").is_empty() && alone.keys("pega1:").is_empty());
}

#[test]
fn slots_on_their_way_through_a_cluster_are_found_where_they_are() {
    let servers = cluster(2, 2, LONG_SILENCE_MS);
    let (blocks, owner, asker) = registered(&cluster_url(&servers[..1]), 4000, hasty());
    let (from, to) = (&servers[0], &servers[1]);
    let ids = [ask_text(from, "CLUSTER MYID"), ask_text(to, "CLUSTER MYID")];
    let slot = |key: &String| -> u16 {
        redis::from_redis_value(ask(&mut from.connect(), &format!("CLUSTER KEYSLOT {key}")).unwrap()).unwrap()
    };
    let slots: BTreeSet<u16> = from.keys("pega1:12:").iter().take(400).map(slot).collect();
    let migrate = |slot: &u16| {
        until("a slot is empty", || {
            let held = ask(&mut from.connect(), &format!("CLUSTER GETKEYSINSLOT {slot} 100")).unwrap();
            let held = redis::from_redis_value::<Vec<String>>(held).unwrap();
            for key in &held {
                // What the other one has not confirmed in time is still here, and sent again.
                let _again = ask(&mut from.connect(), &format!("MIGRATE 127.0.0.1 {} {key} 0 10000 REPLACE", to.port));
            }
            held.is_empty()
        });
    };
    for slot in &slots {
        ask(&mut to.connect(), &format!("CLUSTER SETSLOT {slot} IMPORTING {}", ids[0])).unwrap();
        ask(&mut from.connect(), &format!("CLUSTER SETSLOT {slot} MIGRATING {}", ids[1])).unwrap();
    }
    // So many that each batch has hundreds of commands on keys that are there already.
    slots.iter().take(slots.len() / 2).for_each(migrate);
    blocks.fill((2000..6000).map(block));
    until_found("what is new is registered and found", &asker, (2000..6000).map(block));
    until("what went is not", || named(&asker, &(0..2000).map(block).collect::<Vec<_>>()).is_empty());
    slots.iter().for_each(migrate);
    for (slot, server) in slots.iter().flat_map(|slot| [(slot, to), (slot, from)]) {
        ask(&mut server.connect(), &format!("CLUSTER SETSLOT {slot} NODE {}", ids[1])).unwrap();
    }
    blocks.fill((4000..8000).map(block));
    until_found("what is new is registered and found", &asker, (4000..8000).map(block));
    until("nothing is wrong", || owner.owner_facts().is_some_and(|facts| facts.up && facts.problem.is_none()));
}

#[test]
fn a_sentinel_that_has_not_heard_of_the_next_master_is_passed_over() {
    let (mut former, master) = (Server::start(&[]), Server::start(&[]));
    let sentinels = [Server::start(&["--sentinel"]), Server::start(&["--sentinel"])];
    watch(&sentinels[0], &former, 1);
    watch(&sentinels[1], &master, 1);
    former.kill();
    let url = format!("redis+sentinel://127.0.0.1:{},127.0.0.1:{}/main", sentinels[0].port, sentinels[1].port);
    registered(&url, 100, hasty());
}

#[test]
fn sentinels_say_who_the_master_is() {
    let (mut first, second, sentinel) = (Server::start(&[]), Server::start(&[]), Server::start(&["--sentinel"]));
    let mut connection = sentinel.connect();
    ask(&mut connection, &format!("SENTINEL MONITOR main 127.0.0.1 {} 1", first.port)).unwrap();
    let url = format!("redis+sentinel://127.0.0.1:1,127.0.0.1:{}/main", sentinel.port);
    let blocks = Arc::new(Blocks::new(1, 500));
    blocks.fill((0..500).map(block));
    let owner = open(&blocks, &url, hasty());
    owner.announce(Some(ADDRESS)).unwrap();
    until("registrations", || is_complete(&owner));
    let (asker, all) = (asker(&url), (0..500).map(block).collect::<Vec<_>>());
    until("everything is found", || named(&asker, &all).len() == all.len());
    ask(&mut connection, "SENTINEL REMOVE main").unwrap();
    ask(&mut connection, &format!("SENTINEL MONITOR main 127.0.0.1 {} 1", second.port)).unwrap();
    first.kill();
    until("everything is found at the next master", || named(&asker, &all).len() == all.len());
    let missing = open(&blocks, &url.replace("main", "nobody"), hasty());
    until("a sentence", || {
        assert!(find(&missing, &all).addresses.is_empty());
        missing.asker_facts().problem.is_some_and(|problem| problem.contains("knows none of that name"))
    });
}
