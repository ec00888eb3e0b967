//! One server: flushed, killed, full of foreign things, or not there.

use std::collections::HashSet;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::ErrorKind;
use pegaflow_peers::directory::DirectoryTuning;
use pegaflow_peers::limits::DIRECTORY_BACKOFF_MIN;

use crate::blocks::Blocks;
use crate::server::{Server, ask};
use crate::talk::{ADDRESS, OTHER, asker, block, find, hasty, is_complete, named, open, until, until_found};

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
    until("the living is known", || hosts() == HashSet::from([ADDRESS.to_owned()]));
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

    // A fifth of the slots.
    blocks.under_load(20_000, || {
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
            println!("... and found after another {:?}", until_found(fault, &asker, steady.iter().copied()));
            assert!(named(&asker, &never).is_empty(), "what nobody ever had is not named");
        }
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
    until("they are counted", || owner.owner_facts().unwrap().repaired > 700);
    let mut connection = server.connect();
    for key in server.keys("pega1:") {
        let seconds: i64 = redis::cmd("TTL").arg(&key).query(&mut connection).unwrap();
        // Some may just have gone (-2).
        assert_ne!(seconds, -1, "{key} stays for ever");
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
    until_found("everything is found", &asker(&server.url()), (0..20_000).map(block));
    until("the former buckets are gone", || server.keys("pega1:12:").is_empty());
}

#[test]
fn without_a_server_nobody_is_named_and_nobody_waits() {
    let mut server = Server::start(&[]);
    server.kill();
    let url = server.url().replace("redis://", "redis://:hidden@");
    let blocks = Arc::new(Blocks::new(1, 10));
    let directory = open(&blocks, &url, hasty());
    directory.announce(Some(ADDRESS)).unwrap();
    until("it is left alone for a while", || directory.find(vec![vec![1]]).is_none());
    // Between its pauses questions are taken; when they are is up to the threads.
    for _ in 0..100 {
        assert!(find(&directory, &[1, 2]).addresses.is_empty());
    }
    until("it is counted", || {
        let facts = directory.asker_facts();
        !facts.up && facts.skipped >= 1 && facts.problem.is_some()
    });
    let problem = directory.asker_facts().problem.unwrap();
    assert!(problem.starts_with("the directory's server 127.0.0.1:") && !problem.contains("hidden"), "{problem}");
    until("the owner says so too", || directory.owner_facts().unwrap().problem.is_some());
    assert!(!directory.url().contains("hidden"));
    let refused = directory.announce(Some("here")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn the_question_that_finds_the_server_gone_is_answered_with_nobody_and_counted() {
    let mut server = Server::start(&[]);
    let blocks = Arc::new(Blocks::new(1, 10));
    blocks.fill((0..10).map(block));
    let owner = open(&blocks, &server.url(), hasty());
    owner.announce(Some(ADDRESS)).unwrap();
    until("registrations", || is_complete(&owner));
    // One look, at the beginning: it is not a look that finds the server gone.
    let tuning = DirectoryTuning { refresh: Duration::from_secs(3600), ..hasty() };
    let asker = open(&Arc::new(Blocks::new(99, 0)), &server.url(), tuning);
    until("a look", || !asker.hosts().is_empty());
    server.kill();
    let answer = find(&asker, &[block(1), block(2)]);
    assert!(answer.addresses.is_empty());
    assert_eq!(answer.owners, [[Vec::<u16>::new(), Vec::new()]]);
    until("a question is counted as failed, and the server as down", || {
        assert!(find(&asker, &[block(1)]).addresses.is_empty());
        asker.asker_facts().failed >= 1 && !asker.asker_facts().up
    });
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
fn a_server_that_is_down_is_left_alone_whether_somebody_asks_or_not() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let began = Instant::now();
    let tuning = DirectoryTuning { refresh: Duration::from_millis(1), ..hasty() };
    let directory = open(&Arc::new(Blocks::new(1, 0)), &url, tuning);
    for _ in 0..3 {
        drop(listener.accept().unwrap());
    }
    // The pauses between the three: one, and one twice as long.
    assert!(began.elapsed() >= 3 * DIRECTORY_BACKOFF_MIN, "{:?}", began.elapsed());
    assert!(!directory.asker_facts().up && directory.asker_facts().failed == 0, "{:?}", directory.asker_facts());
    let server = Server::start(&[]);
    let back = open(&Arc::new(Blocks::new(1, 0)), &server.url(), hasty());
    server.signal("-STOP");
    until("a look is in vain", || !back.asker_facts().up);
    server.signal("-CONT");
    until("a look is not", || {
        let facts = back.asker_facts();
        facts.up && facts.problem.is_none()
    });
}
