//! The directory on a real server: what is registered is found, what is lost comes back, and nobody else is ever named.
#![allow(missing_docs)]

mod directory_parts;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use directory_parts::{Blocks, Server, ask};
use pegaflow_engine::ErrorKind;
use pegaflow_peers::directory::{Answer, Directory, DirectoryTuning, block_hash};

const ADDRESS: &str = "10.0.0.1:7400";
const OTHER: &str = "10.0.0.2:7400";

/// Hash of the block of a number.
fn block(number: u64) -> u64 {
    block_hash(7, &number.to_le_bytes())
}

fn hasty() -> DirectoryTuning {
    let refresh = Duration::from_millis(200);
    DirectoryTuning { refresh, record_life: Duration::from_secs(5), ..DirectoryTuning::default() }
}

fn open(blocks: &Arc<Blocks>, url: &str, tuning: DirectoryTuning) -> Directory {
    Directory::open(Arc::clone(blocks) as _, url, tuning).unwrap()
}

/// Somebody who has nothing and asks.
fn asker(url: &str) -> Directory {
    open(&Arc::new(Blocks::new(99, 0)), url, hasty())
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(90), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
    began.elapsed()
}

/// What the directory says; nothing if it is not to be asked.
fn find(directory: &Directory, hashes: &[u64]) -> Answer {
    let Some(query) = directory.find(vec![hashes.to_vec()]) else { return Answer::default() };
    loop {
        match query.poll() {
            Some(answer) => return answer,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Of the hashes, those for which somebody is named.
fn named(directory: &Directory, hashes: &[u64]) -> HashSet<u64> {
    let mut named = HashSet::new();
    for part in hashes.chunks(4096) {
        let answer = find(directory, part);
        let owners = answer.owners.into_iter().flatten();
        named.extend(part.iter().zip(owners).filter(|(_, owners)| !owners.is_empty()).map(|(hash, _)| *hash));
    }
    named
}

fn is_complete(directory: &Directory) -> bool {
    directory.owner_facts().is_some_and(|facts| facts.up && facts.complete)
}

#[test]
fn hosts_that_are_there_are_known_whatever_they_have_and_the_dead_are_forgotten() {
    let server = Server::start(&[]);
    let tuning = DirectoryTuning { record_life: Duration::from_secs(1), ..hasty() };
    let owner = |pool_id| open(&Arc::new(Blocks::new(pool_id, 10)), &server.url(), tuning.clone());
    let (first, second, asker) = (owner(1), owner(2), asker(&server.url()));
    let hosts = || asker.hosts().iter().map(ToString::to_string).collect::<HashSet<String>>();
    first.announce(Some(ADDRESS)).unwrap();
    second.announce(Some(OTHER)).unwrap();
    until("both are there", || hosts() == HashSet::from([ADDRESS.to_owned(), OTHER.to_owned()]));
    until("nobody is told of itself", || first.hosts().iter().any(|host| **host == *OTHER));
    assert!(!first.hosts().iter().any(|host| **host == *ADDRESS));
    second.announce(None).unwrap();
    until("one has left", || hosts() == HashSet::from([ADDRESS.to_owned()]));
    // One that has died without leaving: it is in the set, and has no record.
    let mut connection = server.connect();
    ask(&mut connection, "SADD pega1:owners 0000abcd").unwrap();
    until("the dead are taken away", || {
        matches!(ask(&mut connection, "SISMEMBER pega1:owners 0000abcd"), Ok(redis::Value::Int(0)))
    });
    assert_eq!(hosts(), HashSet::from([ADDRESS.to_owned()]));
    drop(server);
    until("the store is gone, and so is what is known", || asker.hosts().is_empty());
}

#[test]
fn what_is_registered_is_found_with_its_owner_and_what_goes_is_not() {
    let server = Server::start(&[]);
    let (first, second) = (Arc::new(Blocks::new(1, 1000)), Arc::new(Blocks::new(2, 1000)));
    first.fill((0..600).map(block));
    second.fill((400..1000).map(block));
    let owners = [open(&first, &server.url(), hasty()), open(&second, &server.url(), hasty())];
    owners[0].announce(Some(ADDRESS)).unwrap();
    owners[1].announce(Some(OTHER)).unwrap();
    until("registrations", || owners.iter().all(is_complete));

    let asker = asker(&server.url());
    // An answer may be late, and then it names nobody: what is there is asked for until it is named.
    for (number, addresses) in [(0, &[ADDRESS][..]), (500, &[ADDRESS, OTHER]), (999, &[OTHER]), (5000, &[])] {
        until("the right owners", || {
            let answer = find(&asker, &[block(number)]);
            answer.addresses.iter().map(|address| &**address).collect::<HashSet<_>>()
                == addresses.iter().copied().collect::<HashSet<_>>()
        });
    }
    let most: Vec<u64> = (300..1000).map(block).collect();
    until("the best owner", || find(&asker, &most).best(1).first().is_some_and(|address| &**address == OTHER));
    assert!(named(&owners[0], &(0..400).map(block).collect::<Vec<_>>()).is_empty(), "nobody is sent to himself");

    for slot in 0..100 {
        first.put(slot, None);
    }
    let all: Vec<u64> = (0..1000).map(block).collect();
    until("removals", || named(&asker, &all).len() == 900);
    owners[1].announce(None).unwrap();
    let left = first.held();
    until("an owner that left is forgotten", || named(&asker, &all) == left);
}

#[test]
fn after_flushes_deaths_and_restarts_under_load_everything_is_registered_again() {
    let mut server = Server::start(&[]);
    let blocks = Arc::new(Blocks::new(1, 100_000));
    blocks.fill((0..100_000).map(block));
    let owner = open(&blocks, &server.url(), DirectoryTuning::default());
    owner.announce(Some(ADDRESS)).unwrap();
    let first = until("the first time", || is_complete(&owner));
    println!("100,000 blocks registered in {first:?}");
    let asker = asker(&server.url());
    let steady: Vec<u64> = (20_000..100_000).map(block).collect();
    let never: Vec<u64> = (1 << 40..(1 << 40) + 2000).map(block).collect();

    std::thread::scope(|scope| {
        let (stop, stopped) = channel::<()>();
        let changing = &blocks;
        scope.spawn(move || {
            let mut number = 1_000_000;
            // Load: a fifth of the slots change hands all the time.
            while stopped.recv_timeout(Duration::from_millis(1)) == Err(RecvTimeoutError::Timeout) {
                for _ in 0..5 {
                    changing.put(number as usize * 7919 % 20_000, Some(block(number)));
                    number += 1;
                }
            }
        });
        for fault in ["flush", "kill -9, restart at once", "flush", "kill -9, restart after three seconds"] {
            let before = owner.owner_facts().unwrap().anew;
            if fault == "flush" {
                ask(&mut server.connect(), "FLUSHALL").unwrap();
            } else {
                server.kill();
                let began = Instant::now();
                while fault.ends_with("seconds") && began.elapsed() < Duration::from_secs(3) {
                    assert!(named(&asker, &steady[..100]).is_empty());
                    std::thread::sleep(Duration::from_millis(10));
                }
                server.restart();
            }
            let is_done = || owner.owner_facts().is_some_and(|facts| facts.anew > before && facts.complete);
            println!("{fault}: everything is registered again after {:?}", until(fault, is_done));
            let is_found = || named(&asker, &steady).len() == steady.len();
            println!("... and found after another {:?}", until(fault, is_found));
            assert!(named(&asker, &never).is_empty(), "what nobody ever had is not named");
        }
        drop(stop);
    });
    assert!(owner.owner_facts().unwrap().anew >= 5, "{:?}", owner.owner_facts());
}

#[test]
fn after_any_changes_the_directory_says_what_the_pool_has() {
    let server = Server::start(&[]);
    let blocks = Arc::new(Blocks::new(1, 2000));
    let owner = open(&blocks, &server.url(), hasty());
    owner.announce(Some(ADDRESS)).unwrap();
    let asker = asker(&server.url());
    let mut random = 88_172_645_463_325_252_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as usize
    };
    for _ in 0..5 {
        for _ in 0..3000 {
            let slot = next() % 2000;
            match next() % 4 {
                // Of so few different blocks that many lie in several slots.
                0 | 1 => drop(blocks.put(slot, Some(block(next() as u64 % 4000)))),
                2 => drop(blocks.put(slot, None)),
                _ => {
                    // It moves: first there are two of them.
                    let from = next() % 2000;
                    if let Some(hash) = blocks.held().into_iter().nth(from % 700) {
                        blocks.put(slot, Some(hash));
                        blocks.put(from, None);
                    }
                }
            }
        }
        let (all, held) = ((0..4000).map(block).collect::<Vec<_>>(), blocks.held());
        until("the same in both", || named(&asker, &all) == held);
    }
    assert!(named(&asker, &(0..4000).map(block).collect::<Vec<_>>()).iter().all(|hash| blocks.had(*hash)));
}

#[test]
fn entries_of_owners_that_are_gone_for_long_are_taken_away_and_buckets_expire() {
    let server = Server::start(&[]);
    let tuning = DirectoryTuning { dead_after: Duration::from_millis(500), repairs_per_second: 1e6, ..hasty() };
    let dead = Arc::new(Blocks::new(1, 1000));
    dead.fill((0..1000).map(block));
    let gone = open(&dead, &server.url(), tuning.clone());
    gone.announce(Some(OTHER)).unwrap();
    until("registrations", || is_complete(&gone));
    gone.announce(None).unwrap();

    let blocks = Arc::new(Blocks::new(2, 4000));
    blocks.fill((500..4500).map(block));
    let owner = open(&blocks, &server.url(), tuning);
    owner.announce(Some(ADDRESS)).unwrap();
    until("registrations", || is_complete(&owner));
    until("what others have left is taken away", || {
        let mut connection = server.connect();
        let buckets = server.keys("pega1:12:");
        let entries = |key: &String| redis::cmd("ZCARD").arg(key).query::<usize>(&mut connection).unwrap();
        // Buckets in which the living owner has nothing are not looked at: they expire.
        let entries: usize = buckets.iter().map(entries).sum();
        entries < 4000 + 250
    });
    assert!(owner.owner_facts().unwrap().repaired > 700, "{:?}", owner.owner_facts());
    let mut connection = server.connect();
    for key in server.keys("pega1:") {
        let seconds: i64 = redis::cmd("TTL").arg(&key).query(&mut connection).unwrap();
        assert!(seconds >= 0, "{key} stays for ever");
    }
}

#[test]
fn a_pool_whose_number_another_one_has_takes_the_next() {
    let server = Server::start(&[]);
    let blocks = Arc::new(Blocks::new(1, 100));
    blocks.fill((0..100).map(block));
    let owner = open(&blocks, &server.url(), hasty());
    owner.announce(Some(ADDRESS)).unwrap();
    until("registrations", || is_complete(&owner));
    let number = owner.owner_facts().unwrap().number;
    let mut record = redis::cmd("SET");
    record
        .arg(format!("pega1:o:{number:08x}"))
        .arg(format!("{:016x} {OTHER}", 77))
        .exec(&mut server.connect())
        .unwrap();
    until("another number", || owner.owner_facts().unwrap().number != number);
    let (asker, all) = (asker(&server.url()), (0..100).map(block).collect::<Vec<_>>());
    until("the right owner is named", || {
        let answer = find(&asker, &all);
        answer.owners[0]
            .iter()
            .all(|owners| owners.iter().any(|owner| &*answer.addresses[usize::from(*owner)] == ADDRESS))
    });
}

#[test]
fn buckets_that_are_too_full_are_made_finer() {
    let server = Server::start(&[]);
    ask(&mut server.connect(), "SET pega1:layout 12").unwrap();
    let blocks = Arc::new(Blocks::new(1, 20_000));
    blocks.fill((0..20_000).map(block));
    let owner = open(&blocks, &server.url(), DirectoryTuning { bucket_entries_max: 4, ..hasty() });
    owner.announce(Some(ADDRESS)).unwrap();
    until("finer buckets", || is_complete(&owner) && !server.keys("pega1:15:").is_empty());
    let (asker, all) = (asker(&server.url()), (0..20_000).map(block).collect::<Vec<_>>());
    until("everything is found", || named(&asker, &all).len() == all.len());
    assert!(server.keys("pega1:12:").is_empty(), "the former buckets are gone");
}

#[test]
fn without_a_server_nobody_is_named_and_nobody_waits() {
    let mut server = Server::start(&[]);
    server.kill();
    let url = server.url().replace("redis://", "redis://:hidden@");
    let blocks = Arc::new(Blocks::new(1, 10));
    let directory = open(&blocks, &url, hasty());
    directory.announce(Some(ADDRESS)).unwrap();
    let answer = find(&directory, &[1, 2]);
    assert!(answer.addresses.is_empty() && answer.owners == [[Vec::<u16>::new(), Vec::new()]]);
    until("it is left alone for a while", || directory.find(vec![vec![1]]).is_none());
    let facts = directory.asker_facts();
    assert!(!facts.up && facts.failed >= 1 && facts.skipped >= 1, "{facts:?}");
    let problem = facts.problem.unwrap();
    assert!(problem.starts_with("the directory's server 127.0.0.1:") && !problem.contains("hidden"), "{problem}");
    until("the owner says so too", || directory.owner_facts().unwrap().problem.is_some());
    assert!(!directory.url().contains("hidden"));
    let refused = directory.announce(Some("here")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_server_that_answers_garbage_or_holds_foreign_things_is_survived() {
    let server = Server::start(&[]);
    let mut connection = server.connect();
    let blocks = Arc::new(Blocks::new(1, 10));
    blocks.fill((0..10).map(block));
    ask(&mut connection, "SET pega1:layout nonsense").unwrap();
    let owner = open(&blocks, &server.url(), hasty());
    owner.announce(Some(ADDRESS)).unwrap();
    until("a sentence", || {
        owner.owner_facts().unwrap().problem.is_some_and(|problem| problem.contains("delete the key"))
    });
    let asker = asker(&server.url());
    assert!(named(&asker, &[block(1)]).is_empty());
    ask(&mut connection, "DEL pega1:layout").unwrap();
    until("registrations", || is_complete(&owner));
    for key in server.keys("pega1:12:") {
        redis::cmd("SET").arg(key).arg("a string").exec(&mut connection).unwrap();
    }
    assert!(named(&asker, &[block(1)]).is_empty(), "a refusal is a miss");
    until("a sentence", || named(&asker, &[block(1)]).is_empty() && asker.asker_facts().problem.is_some());
}

#[test]
fn a_cluster_is_used_as_a_whole_and_a_server_that_lost_its_part_gets_it_again() {
    let mut servers: Vec<Server> = (0..3).map(|_| Server::start(&["--cluster-enabled", "yes"])).collect();
    let bounds = [(0, 5000), (5001, 10_000), (10_001, 16_383)];
    for (server, (first, last)) in servers.iter().zip(bounds) {
        let mut connection = server.connect();
        let slots: String = (first..=last).map(|slot| format!(" {slot}")).collect();
        ask(&mut connection, &format!("CLUSTER ADDSLOTS{slots}")).unwrap();
        ask(&mut connection, &format!("CLUSTER MEET 127.0.0.1 {}", servers[0].port)).unwrap();
    }
    let url = format!("redis+cluster://127.0.0.1:{},127.0.0.1:{}", servers[1].port, servers[0].port);
    let blocks = Arc::new(Blocks::new(1, 5000));
    blocks.fill((0..5000).map(block));
    let owner = open(&blocks, &url, hasty());
    owner.announce(Some(ADDRESS)).unwrap();
    until("registrations in the cluster", || is_complete(&owner));
    assert!(servers.iter().all(|server| !server.keys("pega1:12:").is_empty()), "all servers have buckets");
    let (asker, all) = (asker(&url), (0..5000).map(block).collect::<Vec<_>>());
    until("everything is found", || named(&asker, &all).len() == all.len());
    servers[2].restart();
    ask(&mut servers[1].connect(), "FLUSHALL").unwrap();
    until("everything is found again", || named(&asker, &all).len() == all.len());
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
