//! A pool and its tier on fake disks: what is written comes back equal, is read once, and never after a reset; dead
//! disks are in nobody's way.

use std::time::Duration;

use super::ask::gives_up;
use super::fake_pool::{Instances, Life, key, keys, until};
use super::{Admission, Tier, TierState};
use crate::ErrorKind;
use crate::limits::{SSD_FORGET_WAIT_MAX, SSD_REQUESTS_MAX};
use crate::ssd::fake_block::Fixture;
use crate::ssd::fake_disk::Faults;

/// Slots of a pool that is soon full.
const FEW: u64 = 64;
const LATE: Faults = Faults { late: 90, ..Faults::NONE };

fn spilled(fixture: &Fixture, chain: &[crate::Key], slots: u64) -> Life {
    let life = Life::new(fixture, Admission::All, slots);
    life.until_serving();
    life.store_all(chain, 1);
    until("writing", || life.count("records") as usize >= chain.len());
    life
}

#[test]
fn evicted_blocks_come_back_from_ssd_with_equal_bytes() {
    let (fixture, chain, mut others) = (Fixture::new(2, 1), keys(0..20), 1000);
    let life = spilled(&fixture, &chain, FEW);
    let all_in_memory = life.pool.tiers(life.ns, &chain).unwrap();
    assert!(all_in_memory.iter().all(|tier| *tier == Tier::Memory));
    life.push_out(&chain, &mut others);
    assert_eq!(life.on_ssd(&chain), chain.len());
    assert_eq!(life.fetch(&chain), Some(chain.len()));
    assert_eq!(life.check(&chain, |_, nonce| nonce == 1), chain.len());
    assert_eq!(life.count("read_blocks"), chain.len() as u64);
    life.assert_clean();
}

#[test]
fn a_new_pool_finds_everything_on_disk() {
    let (fixture, chain) = (Fixture::new(2, 2), keys(0..30));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    assert_eq!(life.on_ssd(&chain), chain.len());
    assert_eq!(life.fetch(&chain), Some(chain.len()));
    assert_eq!(life.check(&chain, |_, nonce| nonce == 1), chain.len());
    assert_eq!(life.count("spilled_blocks"), 0, "they are there already");
}

#[test]
fn blocks_in_memory_between_blocks_on_ssd_make_one_prefix() {
    let (fixture, chain) = (Fixture::new(1, 3), keys(0..12));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    life.store_all(&chain[..4], 1);
    assert_eq!(life.fetch(&chain[..8]), Some(8));
    assert_eq!(life.check(&chain, |_, nonce| nonce == 1), 8);
    assert_eq!(life.fetch(&chain), Some(12));
    assert_eq!((life.count("read_blocks"), life.check(&chain, |_, nonce| nonce == 1)), (8, 12));
    let beyond = [chain.clone(), keys(500..502)].concat();
    assert_eq!(life.fetch(&beyond), Some(12), "a chain ends at its first gap");
}

#[test]
fn blocks_without_parents_are_brought_one_by_one() {
    let (fixture, chain) = (Fixture::new(1, 4), keys(0..6));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    let wanted = [chain[5], key(999), chain[2]];
    let request = life.ask_for(&wanted, None, false);
    until("an answer", || request.poll().is_some());
    assert_eq!(request.poll(), Some(2));
    assert_eq!(life.pool.contains(life.ns, &wanted).unwrap(), [true, false, true]);
}

#[test]
fn two_requesters_cost_one_read() {
    let (fixture, chain) = (Fixture::new(1, 5), keys(0..8));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    fixture.disk.set(Faults { hang: true, ..Faults::default() });
    let ask = || life.ask(&chain);
    let requests = [ask(), ask(), ask()];
    until("requests", || life.count("requests") == 3 && life.count("read_joined") >= 2 * chain.len() as u64);
    fixture.disk.set(Faults::default());
    for request in &requests {
        until("an answer", || request.poll().is_some());
        assert_eq!(request.poll(), Some(chain.len()));
    }
    assert_eq!(life.count("read_blocks"), chain.len() as u64);
    drop(requests);
    life.assert_clean();
}

#[test]
fn what_nobody_waits_for_any_more_comes_into_memory_all_the_same() {
    let (fixture, chain) = (Fixture::new(1, 6), keys(0..16));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    // From here on there are slots.
    life.store_all(&keys(500..501), 1);
    fixture.disk.set(Faults { hang: true, ..Faults::default() });
    let request = life.ask(&chain);
    until("queued bytes", || life.count("queued_bytes") > 0);
    drop(request);
    std::thread::sleep(Duration::from_millis(5));
    assert!(life.count("queued_bytes") > 0, "others wait for what is read for nobody");
    fixture.disk.set(LATE);
    until("blocks in memory", || life.pool.lookup(life.ns, &chain, 0).unwrap() > 0);
    life.assert_clean();
    life.check(&chain, |_, nonce| nonce == 1);
}

#[test]
fn reads_that_nobody_waits_for_and_that_have_not_begun_are_not_made() {
    let (fixture, chain) = (Fixture::new(1, 23), keys(0..10));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    life.store_all(&keys(500..501), 1);
    let (begun, bytes) = (u64::from(fixture.options.read_depth), super::fake_pool::PART_BYTES.iter().sum::<u64>());
    let queued = |blocks: u64| until("queued reads", || life.count("queued_bytes") == blocks * bytes);
    fixture.disk.set(Faults { hang: true, ..Faults::NONE });
    let ask = |count: usize| life.ask(&chain[..count]);
    let request = ask(10);
    queued(10);
    let other = ask(6);
    until("a second request", || life.count("read_joined") == 6);
    drop(request);
    // What the other waits for is left.
    queued(6);
    drop(other);
    queued(begun);
    fixture.disk.set(Faults::NONE);
    until("the rest in memory", || life.pool.lookup(life.ns, &chain, 0).unwrap() as u64 == begun);
    assert_eq!(life.count("read_blocks"), begun);
    life.assert_clean();
    assert_eq!(life.fetch(&chain), Some(chain.len()), "nothing is lost by that");
    life.check(&chain, |_, nonce| nonce == 1);
}

#[test]
fn a_full_board_is_a_miss_at_once_and_has_room_again() {
    let (fixture, chain) = (Fixture::new(1, 7), keys(0..4));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    let requests: Vec<_> = (0..SSD_REQUESTS_MAX).map(|_| life.ask(&chain)).collect();
    until("a refusal", || {
        assert!(life.pool.prefetch(life.ns, &chain, None, true).unwrap().is_none());
        life.count("requests_refused") == 1
    });
    drop(requests);
    assert_eq!(life.fetch(&chain), Some(4));
    life.assert_clean();
}

#[test]
fn without_a_leader_nothing_is_on_ssd_and_nobody_waits() {
    let (fixture, chain) = (Fixture::new(1, 8), keys(0..4));
    let life = spilled(&fixture, &chain, FEW);
    life.push_out(&chain, &mut 1000);
    let request = life.ask(&chain);
    life.stop_leading();
    assert!(request.poll().is_some());
    assert_eq!(life.on_ssd(&chain), 0);
    assert!(life.pool.prefetch(life.ns, &chain, None, true).unwrap().is_none());
    assert!(life.pool.ssd_read_seconds(1).unwrap().is_none());
}

#[test]
fn only_blocks_that_were_used_again_or_are_next_to_go_are_written() {
    let fixture = Fixture::new(1, 9);
    let life = Life::new(&fixture, Admission::SecondTouch, 4 * FEW);
    life.until_serving();
    let (hot, cold) = (keys(0..3), keys(100..110));
    for chain in [&hot, &cold] {
        chain.iter().for_each(|key| life.store_all(&[*key], 1));
    }
    until("writing", || {
        for key in &hot {
            life.pool.touch(life.ns, &[*key]).unwrap();
        }
        life.count("records") == 3
    });
    // Full, but nothing has to go yet.
    for number in 1000..1000 + 4 * FEW - 14 {
        life.store_all(&[key(number)], 1);
    }
    until("writing of those that are next to go", || life.count("records") > 3);
    let all = [hot, cold].concat();
    assert!(life.pool.contains(life.ns, &all).unwrap().iter().all(|present| *present));
}

#[test]
fn a_dead_disk_turns_the_tier_off_and_saves_and_loads_go_on() {
    for (seed, faults) in [
        (10, Faults { read_error: 100, write_error: 100, ..Faults::default() }),
        (11, Faults { hang: true, ..Faults::default() }),
    ] {
        let mut fixture = Fixture::new(1, seed);
        fixture.options.hang_max = Duration::from_millis(300);
        let (chain, fresh) = (keys(0..20), keys(50..60));
        let life = spilled(&fixture, &chain, FEW);
        life.push_out(&chain, &mut 1000);
        fixture.disk.set(faults);
        let request = life.ask(&chain);
        life.store_all(&fresh, 2);
        assert_eq!(life.check(&fresh, |_, nonce| nonce == 2), fresh.len());
        until("an answer", || request.poll().is_some());
        let mut next = chain.iter().cycle();
        until("the end of the tier", || {
            // What was not to be read is not asked for again.
            drop(life.pool.prefetch(life.ns, &[*next.next().unwrap()], None, true).unwrap());
            std::thread::sleep(Duration::from_millis(2));
            life.state() == TierState::Off
        });
        assert_eq!(life.on_ssd(&chain), 0);
        assert!(life.pool.prefetch(life.ns, &chain, None, true).unwrap().is_none());
        assert!(life.pool.ssd_read_seconds(1).unwrap().is_none());
        drop(request);
        life.assert_clean();
        assert_eq!(life.check(&fresh, |_, nonce| nonce == 2), fresh.len());
        assert_eq!(life.pool.reset(life.ns).unwrap_err().kind(), ErrorKind::Busy, "the files could not forget");
        assert_eq!(life.pool.lookup(life.ns, &fresh, 0).unwrap(), 0);
    }
}

#[test]
fn a_sync_that_never_ends_turns_the_tier_off_and_no_reset_waits_for_it() {
    let mut fixture = Fixture::new(1, 24);
    fixture.options.hang_max = Duration::from_millis(300);
    let (chain, fresh) = (keys(0..8), keys(50..60));
    let life = spilled(&fixture, &chain, FEW);
    fixture.disk.set(Faults { sync_hangs: true, ..Faults::NONE });
    assert_eq!(life.pool.reset(life.ns).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(life.pool.lookup(life.ns, &chain, 0).unwrap(), 0, "in memory they are gone at once");
    until("the end of the tier", || life.state() == TierState::Off);
    assert!(life.pool.prefetch(life.ns, &chain, None, true).unwrap().is_none());
    life.store_all(&fresh, 2);
    assert_eq!(life.check(&fresh, |_, nonce| nonce == 2), fresh.len());
    life.assert_clean();
}

#[test]
fn hanging_reads_are_not_worth_waiting_for_long_before_the_disk_is_given_up() {
    let (fixture, chain) = (Fixture::new(1, 12), keys(0..4));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    until("an estimate", || life.pool.ssd_read_seconds(1 << 30).unwrap().is_some_and(|seconds| seconds > 0.0));
    fixture.disk.set(Faults { hang: true, ..Faults::default() });
    let request = life.ask(&chain);
    until("doubts", || life.pool.ssd_read_seconds(1).unwrap().is_none());
    assert_eq!((request.poll(), life.state()), (None, TierState::Serving));
    fixture.disk.set(Faults::default());
    until("an answer", || request.poll() == Some(4));
    until("an estimate", || life.pool.ssd_read_seconds(1).unwrap().is_some());
}

#[test]
fn what_was_reset_never_comes_back() {
    let (fixture, chain) = (Fixture::new(2, 13), keys(0..16));
    let life = spilled(&fixture, &chain, FEW);
    life.reset();
    assert_eq!(life.on_ssd(&chain), 0);
    assert_eq!(life.fetch(&chain), Some(0));
    life.store_all(&chain[..5], 2);
    until("writing", || life.count("spilled_blocks") as usize == chain.len() + 5);
    drop(life);
    fixture.disk.crash();
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    let found = life.fetch(&chain).unwrap();
    assert!(found <= 5);
    assert_eq!(life.check(&chain, |_, nonce| nonce == 2), found);
}

#[test]
fn a_reset_while_blocks_are_being_read_is_not_undone_by_them() {
    let (fixture, chain) = (Fixture::new(1, 14), keys(0..16));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    fixture.disk.set(LATE);
    let request = life.ask(&chain);
    until("reads", || life.count("queued_bytes") > 0 || request.poll().is_some());
    life.reset();
    until("an answer", || request.poll().is_some());
    assert_eq!(life.pool.lookup(life.ns, &chain, 0).unwrap(), 0);
    drop(request);
    life.assert_clean();
    assert_eq!(life.fetch(&chain), Some(0));
}

#[test]
fn a_reset_without_a_leader_is_an_error() {
    let (fixture, chain) = (Fixture::new(1, 16), keys(0..8));
    let life = spilled(&fixture, &chain, FEW);
    life.stop_leading();
    assert_eq!(life.pool.reset(life.ns).unwrap_err().kind(), ErrorKind::Busy);
}

#[test]
fn a_reset_waits_only_for_a_tier_that_works() {
    for (state, waits) in
        [(TierState::None, false), (TierState::Recovering, true), (TierState::Serving, true), (TierState::Off, false)]
    {
        assert_eq!(!gives_up(state, Duration::ZERO), waits, "{state:?}");
        assert!(gives_up(state, SSD_FORGET_WAIT_MAX + Duration::from_millis(1)), "{state:?}");
    }
}

#[test]
fn a_reset_that_is_not_waited_for_reaches_the_files_all_the_same() {
    let (fixture, chain) = (Fixture::new(1, 17), keys(0..8));
    let life = spilled(&fixture, &chain, FEW);
    life.pool.reset_memory(life.ns).unwrap();
    until("forgetting", || life.pool.core().tier_segment().unwrap().forgotten(life.ns.id()) == 2);
    assert_eq!(life.fetch(&chain), Some(0));
}

#[test]
fn a_reset_that_the_last_leader_did_not_see_is_followed_by_the_next() {
    let (fixture, chain) = (Fixture::new(1, 15), keys(0..8));
    let life = spilled(&fixture, &chain, FEW);
    life.stop_leading();
    // As if the process had died between both steps.
    life.pool.core().reset(life.ns).unwrap();
    let core = life.pool.core();
    assert!(core.tier_segment().unwrap().forgotten(life.ns.id()) < 2);
    let options = super::TierOptions { store: fixture.options.clone(), ..Default::default() };
    let next = fixture.clone();
    core.tier.allow_again();
    life.pool.serve_ssd_from(options, Box::new(move || next.open_for())).unwrap();
    life.until_serving();
    assert_eq!(life.fetch(&chain), Some(0));
    drop(life);
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    assert_eq!(life.fetch(&chain), Some(0), "not in another pool either");
}

#[test]
fn namespaces_that_do_not_take_part_are_not_written() {
    let fixture = Fixture::new(1, 16);
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    let other = life.pool.namespace(&[8; 32], 0, &super::fake_pool::PART_BYTES, "other").unwrap();
    let mine = Life { pool: life.pool.clone(), ns: other };
    mine.store_all(&keys(0..4), 1);
    life.store_all(&keys(4..8), 1);
    until("writing", || life.count("records") == 4);
    assert_eq!(mine.on_ssd(&keys(0..4)), 0);
    mine.pool.reset(other).unwrap();
}

#[test]
fn an_instance_at_its_share_reads_into_its_own_room_whoever_leads() {
    let (fixture, mine, theirs) = (Fixture::new(4, 17), keys(0..8), keys(100..102));
    let instances = Instances::new("share");
    let leader = instances.life(Some(&fixture), 1, FEW);
    let asker = instances.life(None, 2, FEW);
    leader.until_serving();
    leader.store_all(&theirs, 1);
    // Before their extent may change hands.
    until("writing", || leader.count("records") as usize >= theirs.len());
    asker.until_serving();
    asker.store_all(&mine, 1);
    until("writing", || leader.count("records") as usize >= mine.len() + theirs.len());
    // Both have all of their share.
    leader.push_out(&theirs, &mut 1000);
    asker.push_out(&mine, &mut 5000);
    assert_eq!(asker.fetch(&mine), Some(mine.len()));
    let row = Some(asker.pool.core().me.row);
    assert_eq!(asker.owners(&mine), vec![row; mine.len()], "on the account of who asked");
    assert_eq!(asker.check(&mine, |_, nonce| nonce == 1), mine.len());
}

#[test]
fn blocks_that_were_in_memory_count_for_what_may_be_held() {
    let (fixture, count) = (Fixture::new(1, 18), 10);
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    let chains: Vec<_> = (0..6u64).map(|number| keys(number * 100..number * 100 + count)).collect();
    chains.iter().for_each(|chain| life.store_all(chain, 1));
    let ask = |chain: &Vec<crate::Key>| life.ask(chain);
    let requests: Vec<_> = chains.iter().map(ask).collect();
    until("answers", || requests.iter().filter_map(super::Prefetch::poll).sum::<usize>() > 0);
    let held_max = (2 * FEW * 1024 / 4 / super::fake_pool::PART_BYTES.iter().sum::<u64>()) as usize;
    for request in requests {
        until("an answer", || request.poll().is_some());
        // One more may be on its way to the files.
        assert!(life.leased() <= held_max + 1, "{} blocks are held", life.leased());
    }
    life.assert_clean();
}

#[test]
fn a_request_without_slots_for_the_rest_is_answered_with_what_it_has() {
    let (fixture, chain) = (Fixture::new(1, 19), keys(0..8));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    life.store_all(&chain[..3], 1);
    let leased = life.pool.lease(life.ns, &chain, 0, 3).unwrap();
    let reserved = life.fill_up();
    let waits = life.ask_for(&chain[3..], Some(chain[2]), true);
    let request = life.ask(&chain);
    until("an answer", || request.poll().is_some());
    assert_eq!((request.poll(), waits.poll()), (Some(3), None), "who has nothing yet waits for longer");
    let refused = life.refused();
    until("more tries", || life.refused() > refused + 1);
    life.pool.abort(&reserved).unwrap();
    until("an answer", || waits.poll() == Some(5));
    life.pool.release(&leased).unwrap();
}

#[test]
fn a_defect_of_the_leader_ends_the_tier_and_leaves_nothing_behind() {
    let (fixture, chain) = (Fixture::new(1, 20), keys(0..8));
    drop(spilled(&fixture, &chain, FEW));
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    life.store_all(&chain[..3], 1);
    fixture.disk.set(Faults { hang: true, ..Faults::default() });
    let request = life.ask(&chain);
    until("reads", || request.found() == 3);
    fixture.disk.set(Faults { panic: true, ..Faults::default() });
    until("the end of the leader", || life.state() == TierState::None);
    assert!(request.poll().is_some());
    life.assert_clean();
    assert!(life.pool.prefetch(life.ns, &chain, None, true).unwrap().is_none());
    assert!(life.pool.ssd().unwrap().unwrap().problem.unwrap().contains("defect"));
    assert_eq!(life.check(&chain, |_, nonce| nonce == 1), 3);
}

#[test]
fn nobody_asks_a_leader_that_has_not_looked_around_for_long() {
    let (fixture, chain) = (Fixture::new(1, 21), keys(0..4));
    let life = spilled(&fixture, &chain, FEW);
    let core = life.pool.core();
    life.stop_leading();
    // As of one that is stopped, and dead to nobody.
    let segment = core.tier_segment().unwrap();
    let header = segment.header();
    let now = crate::shm::clock::boot_ms();
    header.state.store(TierState::Serving as u64, crate::sync::SeqCst);
    header.leader.store(core.me.encode(), crate::sync::SeqCst);
    for (alive_ms, answers) in [(now + (1 << 40), true), (now - 60_000, false), (0, false)] {
        header.alive_ms.store(alive_ms, crate::sync::SeqCst);
        assert_eq!(life.pool.ssd_read_seconds(1).unwrap().is_some(), answers);
        assert_eq!(life.pool.prefetch(life.ns, &chain, None, true).unwrap().is_some(), answers);
        assert_eq!(life.state(), TierState::Serving);
    }
}

#[test]
fn who_has_lost_the_lead_changes_nothing_of_its_successor() {
    let fixture = Fixture::new(1, 22);
    let life = Life::new(&fixture, Admission::All, FEW);
    life.until_serving();
    let core = life.pool.core();
    life.stop_leading();
    let segment = core.tier_segment().unwrap();
    let (leader, row) = (&segment.header().leader, &segment.namespaces()[life.ns.id() as usize]);
    row.epoch.store(5, crate::sync::SeqCst);
    let other = crate::shm::process::Member { row: core.me.row + 1, epoch: 1 };
    for (member, epoch, state) in [(other, 5, TierState::None), (core.me, 0, TierState::Off)] {
        leader.store(member.encode(), crate::sync::SeqCst);
        super::leader::end_lead(core, segment, TierState::Off);
        assert_eq!(row.epoch.load(crate::sync::SeqCst), epoch);
        assert_eq!(segment.header().state.load(crate::sync::SeqCst) as u8, state as u8);
    }
}
