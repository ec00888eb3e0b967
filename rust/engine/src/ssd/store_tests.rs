//! The store on fake disks: what it keeps, what it gives up, and what it does when disks fail.

use std::time::Duration;

use super::fake_block::{Block, Fixture, settle};
use super::fake_disk::Faults;
use super::reader::{ReadOutcome, ReadStart};
use super::store::Event;
use super::writer::{Record, WriteStart};

fn blocks(range: std::ops::Range<u64>) -> Vec<Block> {
    range.map(Block::new).collect()
}

const LATE_AND_SHORT: Faults = Faults { short: 30, late: 30, ..Faults::NONE };

#[test]
fn what_was_written_is_read_again_before_and_after_a_clean_stop() {
    for disks in [1, 3] {
        let fixture = Fixture::new(disks, 1);
        fixture.disk.set(LATE_AND_SHORT);
        let blocks = blocks(0..30);
        let mut store = fixture.recovered();
        fixture.write_through(&mut store, &blocks);
        assert_eq!(fixture.count_whole(&mut store, &blocks), blocks.len());
        assert_eq!(store.counters().records_written, 30);
        store.close().unwrap();
        let mut store = fixture.recovered();
        assert_eq!(store.view().records(), blocks.len());
        assert_eq!(fixture.count_whole(&mut store, &blocks), blocks.len());
        assert!(!store.view().contains(&Block::new(77).id()));
    }
}

#[test]
fn killed_while_idle_it_loses_nothing_and_goes_on_in_the_same_zone() {
    let fixture = Fixture::new(1, 2);
    let mut written = Vec::new();
    for round in 0..20 {
        let mut store = fixture.recovered();
        let more = blocks(2 * round..2 * round + 2);
        fixture.write_through(&mut store, &more);
        written.extend(more);
        assert_eq!(fixture.count_whole(&mut store, &written), written.len());
        assert_eq!(store.counters().zones_evicted, 0);
        // Some stops are clean, so that summaries lie behind records that were added later.
        if round % 3 == 0 {
            store.close().unwrap();
        }
    }
}

#[test]
fn the_oldest_zone_makes_room_and_zones_that_are_read_stay() {
    let fixture = Fixture::new(1, 3);
    let mut store = fixture.recovered();
    let all = blocks(0..400);
    let hot = blocks(0..3);
    for batch in all.chunks(5) {
        fixture.write_through(&mut store, batch);
        assert_eq!(fixture.count_whole(&mut store, &hot), hot.len());
    }
    let counters = store.counters();
    assert!(counters.zones_evicted > 10 && counters.records_evicted > 200, "{counters:?}");
    assert_eq!(fixture.count_whole(&mut store, &all[395..]), 5);
    assert_eq!(store.view().records() as u64, 400 - counters.records_evicted);
    assert_eq!(fixture.count_whole(&mut store, &all), store.view().records());
    assert_eq!(store.counters().reads_damaged, 0);
}

#[test]
fn a_record_larger_than_all_buffers_is_written_and_read() {
    let mut fixture = Fixture::new(2, 4);
    fixture.disk.set(LATE_AND_SHORT);
    fixture.bytes_max = 30 << 10;
    let mut store = fixture.recovered();
    let blocks = blocks(0..8);
    fixture.write_through(&mut store, &blocks);
    assert_eq!(fixture.count_whole(&mut store, &blocks), blocks.len());
    let large = [&[7u8; 32 << 10][..]];
    let record = Record { id: Block::new(99).id(), parts: &large, checksum: None };
    assert_eq!(store.write(&record), WriteStart::Unfit);
    assert_eq!(store.write(&Record { parts: &[], ..record }), WriteStart::Unfit);
}

#[test]
fn a_record_is_written_and_read_once_at_a_time() {
    let fixture = Fixture::new(1, 5);
    let mut store = fixture.recovered();
    let block = Block::new(1);
    assert!(matches!(fixture.write(&mut store, &block), WriteStart::Queued(_)));
    assert_eq!(fixture.write(&mut store, &block), WriteStart::Present);
    assert!(matches!(fixture.start_read(&mut store, &block), ReadStart::Miss(_)), "not before it is on disk");
    store.flush();
    settle(&mut store);
    assert_eq!(fixture.write(&mut store, &block), WriteStart::Present);
    let ReadStart::Started(first) = fixture.start_read(&mut store, &block) else { panic!() };
    assert!(matches!(fixture.start_read(&mut store, &block), ReadStart::Already(ticket, _) if ticket == first));
    assert!(!store.cancel(first), "it was started");
    let events = settle(&mut store);
    assert!(matches!(events[..], [Event::Read(ticket, _, ReadOutcome::Whole)] if ticket == first));
    assert_eq!(fixture.read(&mut store, &block), Some(ReadOutcome::Whole));
}

#[test]
fn bytes_that_changed_in_memory_are_not_written() {
    let fixture = Fixture::new(1, 6);
    let mut store = fixture.recovered();
    let record = Record { id: Block::new(1).id(), parts: &[b"some", b"bytes"], checksum: Some(1) };
    assert_eq!(store.write(&record), WriteStart::Damaged);
    assert_eq!(store.counters().records_refused, 1);
}

#[test]
fn what_was_forgotten_never_comes_back() {
    let fixture = Fixture::new(2, 7);
    let written = blocks(0..30);
    let (kept, forgotten): (Vec<Block>, Vec<Block>) = written.iter().partition(|block| block.namespace != 1);
    let mut store = fixture.recovered();
    fixture.write_through(&mut store, &written);
    store.forget(&[1; 32]).unwrap();
    assert!(forgotten.iter().all(|block| !store.view().contains(&block.id())));
    drop(store);
    fixture.disk.crash();
    let mut store = fixture.recovered();
    assert_eq!(fixture.count_whole(&mut store, &forgotten), 0);
    // The disk tears what was not synced before the superblock was: only what it kept can be found.
    assert_eq!(fixture.count_whole(&mut store, &kept), kept.len(), "forgetting syncs");
    let again: Vec<Block> = forgotten.iter().map(|block| Block { epoch: 1, ..*block }).collect();
    fixture.write_through(&mut store, &again);
    assert_eq!(fixture.count_whole(&mut store, &again), again.len());
}

#[test]
fn what_is_forgotten_without_a_directory_stays_forgotten_when_it_is_back() {
    let fixture = Fixture::new(2, 8);
    let written = blocks(0..30);
    let forgotten: Vec<Block> = written.iter().copied().filter(|block| block.namespace == 1).collect();
    let mut store = fixture.recovered();
    fixture.write_through(&mut store, &written);
    store.close().unwrap();
    fixture.disk.set(Faults { broken: Some(1), ..Faults::default() });
    let mut store = fixture.recovered();
    store.forget(&[1; 32]).unwrap();
    assert!(!store.is_off());
    drop(store);
    fixture.disk.set(Faults::default());
    let mut store = fixture.recovered();
    assert_eq!(fixture.count_whole(&mut store, &forgotten), 0);
    fixture.disk.set(Faults { broken: Some(1), ..Faults::default() });
    store.forget(&[2; 32]).unwrap_err();
}

#[test]
fn a_full_disk_ends_writing_and_reading_goes_on() {
    let fixture = Fixture::new(1, 8);
    let mut store = fixture.recovered();
    let before = blocks(0..10);
    fixture.write_through(&mut store, &before);
    fixture.disk.set(Faults { full: true, ..Faults::default() });
    let lost = Block::new(50);
    assert!(matches!(fixture.write(&mut store, &lost), WriteStart::Queued(_)));
    store.flush();
    assert!(matches!(settle(&mut store)[..], [Event::Lost(_)]));
    assert_eq!(fixture.write(&mut store, &lost), WriteStart::Off);
    assert_eq!(fixture.count_whole(&mut store, &before), before.len());
    assert_eq!((store.counters().turned_off, store.counters().records_lost), (1, 1));
    assert!(!store.is_off());
}

#[test]
fn failed_reads_are_misses_and_turn_a_directory_off_in_the_end() {
    let fixture = Fixture::new(1, 9);
    let mut store = fixture.recovered();
    let blocks = blocks(0..30);
    fixture.write_through(&mut store, &blocks);
    fixture.disk.set(Faults { read_error: 100, ..Faults::default() });
    let outcomes: Vec<_> = blocks.iter().map(|block| fixture.read(&mut store, block)).collect();
    assert_eq!(outcomes[0], Some(ReadOutcome::Failed));
    assert_eq!(outcomes[29], None, "off");
    assert!(store.is_off());
    assert_eq!(fixture.write(&mut store, &Block::new(99)), WriteStart::Off);
    assert!(fixture.open().is_err(), "a superblock that cannot be read");
}

#[test]
fn a_disk_that_hangs_costs_misses_and_nothing_else() {
    let mut fixture = Fixture::new(2, 10);
    fixture.options.hang_max = Duration::from_millis(20);
    let mut store = fixture.recovered();
    let blocks = blocks(0..20);
    fixture.write_through(&mut store, &blocks);
    fixture.disk.set(Faults { hang: true, ..Faults::default() });
    fixture.write(&mut store, &Block::new(50));
    store.flush();
    let started = blocks.iter().filter(|block| matches!(fixture.start_read(&mut store, block), ReadStart::Started(_)));
    let started = started.count();
    let mut ended = 0;
    while ended < started {
        let failed = |event: &Event<_>| matches!(event, Event::Read(_, _, ReadOutcome::Failed));
        ended += store.poll(Duration::from_millis(1)).iter().filter(|event| failed(event)).count();
    }
    assert!(store.is_off());
    assert!(matches!(fixture.start_read(&mut store, &blocks[0]), ReadStart::Miss(_)));
    // The answers come after all: their buffers come back and nothing else happens.
    fixture.disk.set(Faults::default());
    assert!(settle(&mut store).is_empty());
}

#[test]
fn a_directory_that_hangs_during_recovery_keeps_none_of_the_others() {
    let long = Duration::from_secs(3600);
    for (hang_max, disks) in [(long, 2), (Duration::from_millis(20), 2), (Duration::from_millis(20), 5)] {
        let mut fixture = Fixture::new(disks, 15);
        fixture.options.hang_max = hang_max;
        let blocks = blocks(0..20 * disks as u64);
        let mut store = fixture.recovered();
        fixture.write_through(&mut store, &blocks);
        store.close().unwrap();
        let mut store = fixture.open().unwrap();
        fixture.disk.set(Faults { hangs: Some(0), ..Faults::NONE });
        while store.progress().zones_done < 8 * (disks - 1) {
            store.recover_some(Duration::from_millis(1));
        }
        let others = fixture.count_whole(&mut store, &blocks);
        assert!(others > 0 && others < blocks.len(), "{others}");
        if hang_max == long {
            assert_eq!(fixture.write(&mut store, &Block::new(999)), WriteStart::Busy);
            fixture.disk.set(Faults::NONE);
            store.recover();
            assert_eq!(fixture.count_whole(&mut store, &blocks), blocks.len());
            continue;
        }
        store.recover();
        assert_eq!((store.is_off(), store.counters().turned_off), (false, 1));
        let more = (999..1010).map(Block::new).collect::<Vec<_>>();
        fixture.write_through(&mut store, &more);
        assert_eq!(fixture.count_whole(&mut store, &more), more.len());
        assert_eq!(fixture.count_whole(&mut store, &blocks), others);
    }
}

#[test]
fn forgetting_ends_though_a_disk_never_answers_and_is_final_on_all_others() {
    let mut fixture = Fixture::new(3, 16);
    fixture.options.hang_max = Duration::from_millis(20);
    let written = blocks(0..60);
    let mut store = fixture.recovered();
    fixture.write_through(&mut store, &written);
    fixture.disk.set(Faults { hangs: Some(1), ..Faults::NONE });
    for namespace in [1, 2] {
        store.forget(&[namespace; 32]).unwrap();
        assert_eq!(store.counters().turned_off, 1);
    }
    drop(store);
    fixture.disk.set(Faults::NONE);
    fixture.disk.crash();
    let mut store = fixture.recovered();
    let (kept, forgotten): (Vec<Block>, Vec<Block>) = written.iter().partition(|block| block.namespace == 0);
    assert_eq!(fixture.count_whole(&mut store, &forgotten), 0);
    assert!(fixture.count_whole(&mut store, &kept) > 0);
    // Where none of them syncs, nothing is forgotten, and nothing is served any more.
    fixture.disk.set(Faults { sync_hangs: true, ..Faults::NONE });
    store.forget(&[0; 32]).unwrap_err();
    assert!(store.is_off());
    store.close().unwrap();
}

#[test]
fn small_records_side_by_side_are_read_together_and_each_counts_for_itself() {
    let mut fixture = Fixture::new(1, 17);
    fixture.bytes_max = 300;
    let (blocks, bad) = (blocks(0..40), Block::new(20));
    let mut store = fixture.recovered();
    fixture.write_through(&mut store, &blocks);
    let part = bad.parts(300).into_iter().max_by_key(Vec::len).unwrap();
    fixture.disk.damage(0, |bytes, _| {
        let at = bytes.windows(part.len()).position(|window| window == part).unwrap();
        bytes[at] ^= 1;
    });
    let before = fixture.disk.reads();
    let started: Vec<_> = blocks.iter().map(|block| (fixture.start_read(&mut store, block), block)).collect();
    for event in settle(&mut store) {
        let Event::Read(ended, target, outcome) = event else { panic!() };
        let asked = |(start, _): &&(ReadStart<_>, _)| matches!(start, ReadStart::Started(ticket) if *ticket == ended);
        let block = started.iter().find(asked).unwrap().1;
        assert_eq!(outcome, if *block == bad { ReadOutcome::Damaged } else { ReadOutcome::Whole }, "{block:?}");
        assert!(*block == bad || target.0 == block.parts(300), "wrong bytes of {block:?}");
    }
    assert_eq!((store.counters().records_read, store.counters().reads_damaged), (39, 1));
    assert!(fixture.disk.reads() - before < 20, "{} reads", fixture.disk.reads() - before);
}

#[test]
fn a_read_that_has_not_begun_can_be_cancelled() {
    let fixture = Fixture::new(1, 18);
    let mut store = fixture.recovered();
    let blocks = blocks(0..30);
    fixture.write_through(&mut store, &blocks);
    let mut cancelled = 0;
    for block in &blocks {
        let ReadStart::Started(ticket) = fixture.start_read(&mut store, block) else { panic!() };
        cancelled += usize::from(store.cancel(ticket));
        assert!(!store.cancel(ticket), "it is over, or was begun");
    }
    assert!(cancelled > 0);
    assert_eq!(settle(&mut store).len(), blocks.len() - cancelled);
    assert_eq!(fixture.count_whole(&mut store, &blocks), blocks.len(), "nothing is lost by that");
}

#[test]
fn a_disk_that_is_lost_takes_only_its_own_records_along() {
    let fixture = Fixture::new(2, 11);
    let blocks = blocks(0..40);
    let mut store = fixture.recovered();
    fixture.write_through(&mut store, &blocks);
    store.close().unwrap();
    fixture.disk.damage(0, |bytes, _| bytes.fill(0));
    let mut store = fixture.recovered();
    let left = fixture.count_whole(&mut store, &blocks);
    assert!((5..35).contains(&left), "{left}");
    assert_eq!(store.view().records(), left);
}

#[test]
fn another_capacity_adds_or_drops_zones() {
    let mut fixture = Fixture::new(1, 12);
    let blocks = blocks(0..60);
    fixture.write_through(&mut fixture.recovered(), &blocks);
    let before = fixture.count_whole(&mut fixture.recovered(), &blocks);
    let larger = fixture.options.capacity_bytes.map(|bytes| 2 * bytes);
    let old = std::mem::replace(&mut fixture.options.capacity_bytes, larger);
    assert_eq!(fixture.count_whole(&mut fixture.recovered(), &blocks), before);
    assert!(fixture.disk.len(0) > old.unwrap() as usize && fixture.disk.len(0) <= larger.unwrap() as usize);
    fixture.options.capacity_bytes = Some((64 << 10) + 4 * (32 << 10));
    let after = fixture.count_whole(&mut fixture.recovered(), &blocks);
    assert!(after > 0 && after < before, "{after} of {before}");
    assert_eq!(fixture.disk.len(0), (64 << 10) + 4 * (32 << 10));
    fixture.options.capacity_bytes = Some(1000);
    assert!(fixture.open().is_err());
}

#[test]
fn lookups_are_served_while_recovery_runs() {
    let fixture = Fixture::new(1, 13);
    let blocks = blocks(0..60);
    fixture.write_through(&mut fixture.recovered(), &blocks);
    let mut store = fixture.open().unwrap();
    assert_eq!(fixture.write(&mut store, &Block::new(99)), WriteStart::Busy);
    let mut seen = vec![store.view().records()];
    while store.progress().zones_done < store.progress().zones {
        store.recover_some(Duration::from_millis(1));
        seen.push(fixture.count_whole(&mut store, &blocks));
    }
    assert!(seen.len() > 2 && seen.is_sorted() && seen[1] > 0, "{seen:?}");
    assert!(matches!(fixture.write(&mut store, &Block::new(99)), WriteStart::Queued(_)));
}

#[test]
fn disks_of_all_block_sizes_get_what_they_need() {
    for device_block in [512, 4096, 16_384, 65_536] {
        let mut fixture = Fixture::new(1, device_block as u64);
        fixture.disk.set(LATE_AND_SHORT);
        fixture.device_block = device_block;
        fixture.options.block_bytes = None;
        fixture.options.zone_bytes = Some(512 << 10);
        fixture.options.chunk_bytes = 128 << 10;
        fixture.options.capacity_bytes = Some((128 << 10) + 4 * (512 << 10));
        fixture.bytes_max = 100 << 10;
        let blocks = blocks(0..8);
        let mut store = fixture.recovered();
        fixture.write_through(&mut store, &blocks);
        assert_eq!(fixture.count_whole(&mut store, &blocks), blocks.len());
        store.close().unwrap();
        assert_eq!(fixture.count_whole(&mut fixture.recovered(), &blocks), blocks.len());
    }
}

#[test]
fn a_file_that_comes_to_a_disk_with_larger_blocks_is_refused() {
    let mut fixture = Fixture::new(1, 14);
    drop(fixture.recovered());
    fixture.device_block = 4096;
    let error = fixture.open().err().unwrap();
    assert_eq!(error.kind(), crate::ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("512") && error.to_string().contains("4096"), "{error}");
}
