//! Two pools and what goes from one to the other, over a real control plane.
#![allow(missing_docs, reason = "tests")]

mod common;
mod parting;
mod wearing;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use common::net::{Fault, Net};
use common::{
    BLOCK_BYTES, ShmDir, ask, check, connect, connect_by, counter, fetch, fetch_whole, find, key, keys, namespace,
    number, reserved, serve, store, store_summed, until,
};
use parting::{Heard, Parting};
use pegaflow_engine::Pool;
use pegaflow_peers::limits::BACKOFF_MIN;
use pegaflow_peers::transport::TransportKind;
use pegaflow_peers::{Credentials, PeerServer, Peers, PeersOptions, Question, ServerOptions};
use wearing::{Wear, Wearing};

const POOL_BYTES: u64 = 4 << 20;

/// Nothing is reserved or on its way any more.
fn all_is_back(pool: &Arc<Pool>, peers: &Peers) {
    until(|| (reserved(pool, namespace(pool)) == 0).then_some(()));
    until(|| peers.facts().iter().all(|peer| peer.queued_bytes == 0).then_some(()));
}

#[test]
fn blocks_of_a_peer_are_found_fetched_and_published() {
    let (dir, net) = (ShmDir::new("fetch"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    assert_eq!(store(&theirs, namespace(&theirs), 0..50), 50);
    let (server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, &[address]);
    let ns = namespace(&ours);
    let (query, tiers) = find(&peers, ns, &keys(0..60));
    assert_eq!(tiers, [vec![1; 50], vec![0; 10]].concat());
    let fetch = query.fetch(0, 0..60, None).unwrap().unwrap();
    assert_eq!(fetch.keys(), 50);
    assert_eq!(until(|| fetch.poll()), 50);
    assert_eq!(check(&ours, ns, 0..60), 50);
    assert_eq!(ours.lookup(ns, &keys(0..60), 0).unwrap(), 50);
    drop(fetch);
    all_is_back(&ours, &peers);
    assert_eq!(counter(&peers, "blocks_fetched"), 50);
    assert_eq!(counter(&peers, "bytes_fetched"), 50 * BLOCK_BYTES);
    until(|| (server.facts().leased_bytes == 0).then_some(()));
    assert_eq!(server.facts().leases, 0);
    assert!(query.fetch(0, 55..60, None).unwrap().is_none(), "nobody has the first");
    assert!(query.fetch(1, 0..1, None).is_err(), "it was not asked");
    assert!(query.fetch(0, 0..61, None).is_err(), "so many were not asked for");
}

/// What a stream brought was compared with the sender's sums. What a device brought was not, unless the block has one.
#[test]
fn what_was_compared_with_nothing_gets_no_checksum() {
    for kind in [TransportKind::Tcp, TransportKind::Rdma] {
        for summed in [true, false] {
            let (dir, net) = (ShmDir::new(&format!("summed-{kind:?}-{summed}")), Net::default());
            let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
            store_summed(&theirs, namespace(&theirs), 0..20, summed);
            let (_server, address) = serve(&theirs, &net);
            let peers = connect_by(&ours, vec![net.transport_of(&ours, kind)], &[address]);
            let ns = namespace(&ours);
            fetch_whole(&peers, ns, &keys(0..20));
            assert_eq!(check(&ours, ns, 0..20), 20);
            let sum = |pool: &Arc<Pool>| {
                let lent = pool.lend(namespace(pool), &keys(0..20), true, u64::MAX).unwrap();
                lent.iter().map(|(_, block)| block.checksum()).collect::<Vec<_>>()
            };
            if summed {
                assert_eq!(sum(&ours), sum(&theirs));
            }
            let is_known = summed || kind == TransportKind::Tcp;
            assert!(sum(&ours).iter().all(|sum| sum.is_some() == is_known), "{kind:?}, {summed}");
        }
    }
}

#[test]
fn a_fetch_leaves_out_what_is_there_and_goes_on_behind_it() {
    let (dir, net) = (ShmDir::new("partly"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..30);
    let ns = namespace(&ours);
    store(&ours, ns, 0..10);
    let (_server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, &[address]);
    let (query, _) = find(&peers, ns, &keys(5..30));
    let got = query.fetch(0, 0..25, Some(key(4))).unwrap().unwrap();
    assert_eq!(until(|| got.poll()), 25);
    assert_eq!(counter(&peers, "blocks_fetched"), 20, "ten of them were there");
    assert_eq!(check(&ours, ns, 0..30), 30);
    drop(got);
    all_is_back(&ours, &peers);
}

#[test]
fn keys_without_chain_are_fetched_around_those_that_nobody_has() {
    let (dir, net) = (ShmDir::new("scattered"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    let there = namespace(&theirs);
    for number in [3, 5, 8] {
        store(&theirs, there, number..number + 1);
    }
    let (_server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, &[address]);
    let question = Question { namespace: namespace(&ours), keys: keys(0..10), chained: false };
    let (query, tiers) = ask(&peers, &question);
    assert_eq!(tiers, [0, 0, 0, 1, 0, 1, 0, 0, 1, 0]);
    let fetch = query.fetch(0, 0..10, None).unwrap().unwrap();
    assert_eq!(until(|| fetch.poll()), 3);
    assert_eq!(check(&ours, namespace(&ours), 0..10), 3);
}

#[test]
fn a_pool_does_not_talk_to_itself() {
    let (dir, net) = (ShmDir::new("itself"), Net::default());
    let pool = dir.pool("p", POOL_BYTES);
    let (_server, address) = serve(&pool, &net);
    let options = PeersOptions {
        addresses: vec![address],
        credentials: common::credentials(),
        transports: vec![net.transport(&pool)],
    };
    let peers = Peers::start(Arc::clone(&pool), options).unwrap();
    until(|| (peers.facts()[0].state == "itself").then_some(()));
    let question = Question { namespace: namespace(&pool), keys: keys(0..2), chained: true };
    assert!(peers.find(vec![question]).unwrap().is_none());
    assert_eq!(peers.read_seconds(1), None);
}

#[test]
fn who_does_not_know_the_token_learns_nothing_and_is_told_why() {
    let (dir, net) = (ShmDir::new("token"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    let (server, address) = serve(&theirs, &net);
    let options = PeersOptions {
        addresses: vec![address],
        credentials: Credentials::new(Some("another"), None).unwrap(),
        transports: vec![net.transport(&ours)],
    };
    let peers = Peers::start(ours, options).unwrap();
    until(|| {
        let facts = peers.facts().remove(0);
        (facts.state == "backing off" && facts.problem.is_some_and(|problem| problem.contains("token"))).then_some(())
    });
    assert!(server.facts().numbers.iter().any(|(name, count)| *name == "calls_unknown" && *count > 0));
    assert_eq!(server.facts().sessions, 0);
}

#[test]
fn bytes_that_are_wrong_or_missing_are_a_miss_and_the_peer_is_left_alone() {
    for fault in [Fault::WrongByte, Fault::Breaks, Fault::Panics, Fault::NoWay] {
        let (dir, net) = (ShmDir::new("wrong"), Net::default());
        let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
        store(&theirs, namespace(&theirs), 0..20);
        let (server, address) = serve(&theirs, &net);
        let peers = connect(&ours, &net, &[address]);
        net.set_fault(fault);
        let began = Instant::now();
        let (_, found) = fetch(&peers, namespace(&ours), &keys(0..20));
        assert_eq!(found, 0, "{fault:?}");
        assert_eq!(check(&ours, namespace(&ours), 0..20), 0, "{fault:?}");
        if fault == Fault::Panics {
            continue;
        }
        all_is_back(&ours, &peers);
        assert!(counter(&peers, "failures") > 0, "{fault:?}");
        until(|| (server.facts().leased_bytes == 0).then_some(()));
        net.set_fault(Fault::None);
        until(|| (peers.facts()[0].state == "up").then_some(()));
        assert!(began.elapsed() >= BACKOFF_MIN, "{fault:?}: it was left alone for {:?}", began.elapsed());
        fetch_whole(&peers, namespace(&ours), &keys(0..20));
        assert_eq!(check(&ours, namespace(&ours), 0..20), 20);
    }
}

/// What is asked of a channel that is worn or not, whether another one is refused, then opened in all, then refused in
/// all.
const WORN: [(bool, bool, u64, u64); 4] =
    [(false, false, 1, 0), (true, true, 1, 1), (false, true, 1, 1), (true, false, 2, 1)];

/// Channels that were opened and refused and those that live, after each round of [`WORN`]; `None` if the peer failed,
/// as by an answer that was late, so that channels were opened for that.
fn channels_of_a_peer_that_wear() -> Option<Vec<(u64, u64, u64)>> {
    let (dir, net) = (ShmDir::new("worn"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    for round in 0..4 {
        assert_eq!(store(&theirs, namespace(&theirs), round * 10..round * 10 + 10), 10);
    }
    let (_server, address) = serve(&theirs, &net);
    let (wear, plain) = (Arc::new(Wear::default()), net.transport(&ours));
    let wearing = Arc::new(Wearing(Arc::clone(&wear), Arc::clone(&plain)));
    let options =
        PeersOptions { addresses: vec![address], credentials: common::credentials(), transports: vec![wearing, plain] };
    let peers = Peers::start(Arc::clone(&ours), options).unwrap();
    until(|| (peers.facts()[0].state == "up").then_some(()));
    let mut all = Vec::new();
    for (round, (is_worn, refuses, ..)) in (0..).zip(WORN) {
        wear.is_worn.store(is_worn, Relaxed);
        wear.refuses.store(refuses, Relaxed);
        fetch_whole(&peers, namespace(&ours), &keys(round * 10..round * 10 + 10));
        let [opened, refused, living] = [&wear.opened, &wear.refused, &wear.living].map(|count| count.load(Relaxed));
        all.push((opened, refused, living));
        assert!(peers.facts()[0].transport == Some(TransportKind::Rdma) || counter(&peers, "failures") > 0);
    }
    (counter(&peers, "failures") == 0).then_some(all)
}

#[test]
fn a_worn_channel_stays_until_there_is_another_of_its_kind() {
    let expected = WORN.map(|(_, _, opened, refused)| (opened, refused, 1));
    assert_eq!(until(channels_of_a_peer_that_wear), expected);
}

#[test]
fn what_comes_of_a_read_that_ends_early_is_kept() {
    let (dir, net) = (ShmDir::new("early"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..4);
    let (_server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, &[address]);
    net.set_fault(Fault::FirstOnly);
    assert_eq!(fetch(&peers, namespace(&ours), &keys(0..4)).1, 0, "the second part of the first block has not come");
    all_is_back(&ours, &peers);
}

#[test]
fn slots_that_may_still_be_written_are_never_free() {
    let (dir, net) = (ShmDir::new("quiet"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..20);
    let (_server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, &[address]);
    net.set_fault(Fault::NotQuiet);
    assert_eq!(fetch(&peers, namespace(&ours), &keys(0..20)).1, 0);
    let stats = ours.stats();
    assert!(stats.contains(&("slots_quarantined", 20)), "{stats:?}");
    assert_eq!(counter(&peers, "slots_quarantined"), 20);
}

/// How many of 40 blocks come of one fetch from two peers of which one has no way to give them; `None` if the other one
/// failed, too, as by an answer that was late.
fn fetched_around_a_broken_peer() -> Option<usize> {
    let (dir, net, broken) = (ShmDir::new("second"), Net::default(), Net::default());
    let pools = ["a", "b"].map(|name| dir.pool(name, POOL_BYTES));
    for pool in &pools {
        store(pool, namespace(pool), 0..40);
    }
    let (_first, first) = serve(&pools[0], &net);
    let (_second, second) = serve(&pools[1], &broken);
    broken.set_fault(Fault::Breaks);
    let ours = dir.pool("ours", POOL_BYTES);
    // The second has no data plane in the net that is used.
    let peers = connect(&ours, &net, &[second, first]);
    let (_fetch, found) = fetch(&peers, namespace(&ours), &keys(0..40));
    assert_eq!(check(&ours, namespace(&ours), 0..40), found);
    all_is_back(&ours, &peers);
    let failures = |peer: usize| peers.facts()[peer].numbers.iter().find(|(name, _)| *name == "failures").unwrap().1;
    (failures(1) == 0).then_some(found)
}

#[test]
fn what_one_peer_does_not_give_another_one_is_asked_for() {
    assert_eq!(until(fetched_around_a_broken_peer), 40);
}

#[test]
fn what_waits_for_a_peer_that_has_failed_is_asked_of_others_and_not_of_it() {
    const PROMPTS: u64 = 8;
    let (dir, net) = (ShmDir::new("queued"), Net::default());
    let pools = ["long", "short"].map(|name| dir.pool(name, POOL_BYTES));
    // The first one has more of each, so it is asked for all.
    for (pool, blocks) in pools.iter().zip([20, 19]) {
        for first in (0..PROMPTS).map(|prompt| prompt * 100) {
            store(pool, namespace(pool), first..first + blocks);
        }
    }
    let (_first, first) = serve(&pools[0], &net);
    net.set_fault(Fault::Frozen);
    let (_second, second) = serve(&pools[1], &net);
    let ours = dir.pool("ours", POOL_BYTES);
    let peers = connect(&ours, &net, &[first, second]);
    let question = |prompt: u64| {
        let keys = keys(prompt * 100..prompt * 100 + 20);
        Question { namespace: namespace(&ours), keys, chained: true }
    };
    let query = until(|| {
        let answered = || peers.facts().iter().map(|peer| number(peer, "finds_answered")).collect::<Vec<u64>>();
        let before = answered();
        let query = peers.find((0..PROMPTS).map(question).collect()).unwrap()?;
        until(|| query.poll());
        answered().iter().zip(before).all(|(now, before)| *now > before).then_some(query)
    });
    let fetches: Vec<_> =
        (0..PROMPTS).map(|prompt| query.fetch(prompt as usize, 0..20, None).unwrap().unwrap()).collect();
    until(|| (net.reads() == 1).then_some(()));
    net.turn(Fault::Frozen, Fault::Breaks);
    for fetch in &fetches {
        assert_eq!(until(|| fetch.poll()), 19);
    }
    assert_eq!(counter(&peers, "blocks_leased"), 20, "it was asked again although it had failed");
    all_is_back(&ours, &peers);
}

#[test]
fn a_prefix_comes_in_segments_from_several_peers() {
    let (dir, net) = (ShmDir::new("segments"), Net::default());
    let pools = ["a", "b"].map(|name| dir.pool(name, POOL_BYTES));
    store(&pools[0], namespace(&pools[0]), 0..10);
    // Keys of the second half only, as roots.
    let there = namespace(&pools[1]);
    for number in 10..25 {
        store(&pools[1], there, number..number + 1);
    }
    let (_first, first) = serve(&pools[0], &net);
    let (_second, second) = serve(&pools[1], &net);
    let ours = dir.pool("ours", POOL_BYTES);
    let peers = connect(&ours, &net, &[first, second]);
    let question = Question { namespace: namespace(&ours), keys: keys(0..25), chained: false };
    let (query, tiers) = ask(&peers, &question);
    assert_eq!(tiers, [1; 25]);
    let fetch = query.fetch(0, 0..25, None).unwrap().unwrap();
    assert_eq!(until(|| fetch.poll()), 25);
    assert_eq!(check(&ours, namespace(&ours), 0..25), 25);
    let fetched: Vec<u64> = peers
        .facts()
        .iter()
        .map(|peer| peer.numbers.iter().find(|(name, _)| *name == "blocks_fetched").unwrap().1)
        .collect();
    assert_eq!(fetched, [10, 15]);
}

#[test]
fn a_server_that_starts_anew_is_greeted_anew() {
    let (dir, net) = (ShmDir::new("restart"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..20);
    let (server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, std::slice::from_ref(&address));
    fetch_whole(&peers, namespace(&ours), &keys(0..10));
    drop(server);
    let (server, again) = common::serve_at(&theirs, &net, &address);
    assert_eq!(address, again);
    until(|| {
        let (_, found) = fetch(&peers, namespace(&ours), &keys(0..20));
        (found == 20).then_some(())
    });
    assert_eq!(check(&ours, namespace(&ours), 0..20), 20);
    until(|| (server.facts().sessions == 1).then_some(()));
}

#[test]
fn a_reset_while_blocks_come_keeps_them_out() {
    let (dir, net) = (ShmDir::new("reset"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..20);
    let (_server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, &[address]);
    let ns = namespace(&ours);
    net.set_fault(Fault::Held);
    let (query, _) = find(&peers, ns, &keys(0..20));
    let got = query.fetch(0, 0..20, None).unwrap().unwrap();
    until(|| (net.reads() > 0).then_some(()));
    ours.reset(ns).unwrap();
    net.set_fault(Fault::None);
    assert_eq!(until(|| got.poll()), 0);
    assert_eq!(check(&ours, ns, 0..20), 0);
    all_is_back(&ours, &peers);
}

#[test]
fn a_fetch_that_is_closed_gives_all_back_and_what_was_read_stays() {
    let (dir, net) = (ShmDir::new("closed"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..20);
    let (_server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, &[address]);
    // Whose read stands still for longer than its lease gets nothing of it.
    until(|| {
        let before = net.reads();
        net.set_fault(Fault::Held);
        let (query, _) = find(&peers, namespace(&ours), &keys(0..20));
        let got = query.fetch(0, 0..20, None).unwrap().unwrap();
        until(|| (net.reads() > before).then_some(()));
        drop(got);
        net.set_fault(Fault::None);
        all_is_back(&ours, &peers);
        (check(&ours, namespace(&ours), 0..20) == 20).then_some(())
    });
}

#[test]
fn two_pools_fetch_from_each_other_at_a_time() {
    let (dir, net) = (ShmDir::new("mutual"), Net::default());
    let pools = ["a", "b"].map(|name| dir.pool(name, POOL_BYTES));
    store(&pools[0], namespace(&pools[0]), 0..100);
    store(&pools[1], namespace(&pools[1]), 1000..1100);
    let served = pools.each_ref().map(|pool| serve(pool, &net));
    std::thread::scope(|scope| {
        for (mine, (other, wanted)) in [(0, (1, 1000..1100)), (1, (0, 0..100))] {
            let (pool, address, net) = (&pools[mine], served[other].1.clone(), &net);
            scope.spawn(move || {
                let peers = connect(pool, net, &[address]);
                fetch_whole(&peers, namespace(pool), &keys(wanted.clone()));
                assert_eq!(check(pool, namespace(pool), wanted), 100);
            });
        }
    });
}

#[test]
fn a_pool_that_evicts_under_the_reader_gives_right_bytes_or_none() {
    let (dir, net) = (ShmDir::new("evicts"), Net::default());
    // What is stored once stays until as much has come behind it.
    let (theirs, ours) = (dir.pool_with_policy("theirs", 1 << 20, Some("lru")), dir.pool("ours", POOL_BYTES));
    let there = namespace(&theirs);
    store(&theirs, there, 0..100);
    let (_server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, &[address]);
    let ends = Instant::now() + Duration::from_secs(2);
    let (mut came, mut round) = (0, 0);
    while Instant::now() < ends || came == 0 {
        let wanted = round * 10_000 + 100_000..round * 10_000 + 100_050;
        store(&theirs, there, wanted.clone());
        std::thread::scope(|scope| {
            // As many as there is room for, or fewer, or none.
            let others = 1_000 + round * 200..1_000 + round * 200 + round * 70 % 200;
            let theirs = &theirs;
            scope.spawn(move || {
                for first in others.step_by(10) {
                    store(theirs, there, first..first + 10);
                }
            });
            came += fetch(&peers, namespace(&ours), &keys(wanted.clone())).1;
        });
        check(&ours, namespace(&ours), wanted);
        round += 1;
    }
    assert!(came > 0);
    all_is_back(&ours, &peers);
}

#[test]
fn a_query_of_a_thousand_blocks_is_answered() {
    let (dir, net) = (ShmDir::new("thousand"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", 16 << 20), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..1000);
    let (_server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, &[address]);
    let (_, tiers) = find(&peers, namespace(&ours), &keys(0..1000));
    assert_eq!(tiers, [1; 1000]);
    until(|| peers.read_seconds(1 << 20));
}

#[test]
fn peers_come_and_go_with_the_list_of_addresses() {
    let (dir, net) = (ShmDir::new("list"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    let (_server, address) = serve(&theirs, &net);
    let peers = connect(&ours, &net, std::slice::from_ref(&address));
    assert!(peers.set_addresses(&["nowhere".to_owned()]).is_err());
    peers.set_addresses(&[]).unwrap();
    let question = Question { namespace: namespace(&ours), keys: keys(0..2), chained: true };
    assert!(peers.find(vec![question.clone()]).unwrap().is_none());
    peers.set_addresses(&[address.clone(), address]).unwrap();
    assert_eq!(peers.facts().len(), 1);
    until(|| peers.find(vec![question.clone()]).unwrap());
}

#[test]
fn what_a_channel_that_ends_gives_up_is_told_to_the_peer() {
    let (dir, net) = (ShmDir::new("parting"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..10);
    let heard = Arc::new(Heard::default());
    let options = ServerOptions {
        listen: "127.0.0.1:0".to_owned(),
        credentials: common::credentials(),
        data: Some(net.starter()),
        regions: Some(Arc::clone(&heard) as _),
    };
    let server = PeerServer::start(theirs, options).unwrap();
    let address = until(|| server.facts().address).to_string();
    let options = PeersOptions {
        addresses: vec![address],
        credentials: common::credentials(),
        transports: vec![Arc::new(Parting)],
    };
    let peers = Peers::start(Arc::clone(&ours), options).unwrap();
    until(|| (peers.facts()[0].state == "up").then_some(()));
    assert_eq!(fetch(&peers, namespace(&ours), &keys(0..10)).1, 0, "nothing comes by this transport");
    until(|| (*heard.given_up.lock().unwrap() == [parting::NAME]).then_some(()));
    assert_eq!(heard.connects.load(Relaxed), 1);
}
