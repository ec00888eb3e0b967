//! A process that forks with a pool in its hands.

use std::path::Path;
use std::sync::Arc;

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use pegaflow_engine::{BlockRef, ErrorKind, Key, Namespace, Pool, Result};

use crate::blocks::{MAIN, check_chain, keys, namespace, open, store_all, store_chain, wrong_block};
use crate::{say, wait_for_parent};

pub fn run(dir: &Path, what: &str) {
    let pool = open(dir);
    let ns = namespace(&pool, MAIN);
    let chain = keys(0..4);
    store_all(&pool, ns, &chain[..1], 1);
    store_chain(&pool, ns, &chain, 1);
    let leased = pool.lease(ns, &chain, 0, 4).unwrap();
    match what {
        "refused" => in_child(|| assert_refused(&pool, ns, &chain, &leased)),
        "opens" => in_child(|| assert_own_member(dir, &pool, &chain)),
        "outlives" => outlive(&pool, ns),
        "busy" => fork_while_busy(dir, &pool, ns),
        other => panic!("no fork {other}"),
    }
    for (block, key) in leased.iter().zip(&chain) {
        assert_eq!(wrong_block(&pool, *block, key), None, "the parent's leases are whole");
    }
    pool.release(&leased).unwrap();
    assert_eq!(check_chain(&pool, ns, &chain), 4);
}

/// Do something in a forked child, which then leaves as a Python child does: dropping what it inherited.
fn in_child(work: impl FnOnce()) {
    // SAFETY: this program's threads besides this one are the pool's, and hold no lock that the child needs: the child
    // may not use the pool, which is what is tested.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            // SAFETY: ends the child at once, without the destructors of what belongs to its parent.
            unsafe { libc::_exit(i32::from(outcome.is_err())) };
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0), "the child failed");
        }
    }
}

fn assert_forked<T: std::fmt::Debug>(outcome: Result<T>) {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Forked, "{error}");
    assert!(error.to_string().contains("before fork()"), "{error}");
}

fn assert_refused(pool: &Arc<Pool>, ns: Namespace, chain: &[Key], leased: &[BlockRef]) {
    assert_forked(pool.lookup(ns, chain, 0));
    assert_forked(pool.contains(ns, chain));
    assert_forked(pool.lease(ns, chain, 0, 4));
    assert_forked(pool.touch(ns, chain));
    assert_forked(pool.release(leased));
    assert_forked(pool.reserve(ns, chain, None, true));
    assert_forked(pool.publish(leased));
    assert_forked(pool.abort(leased));
    assert_forked(pool.quarantine(leased));
    assert_forked(pool.mark_written(0, leased, None));
    assert_forked(pool.locate(leased[0], 0));
    assert_forked(pool.namespace(&[1; 32], 0, &[64], "child"));
    assert_forked(pool.namespace_stats(ns));
    assert_forked(pool.member());
    assert_forked(pool.grow_ahead(ns));
    assert_forked(pool.reset(ns));
    assert_forked(pool.reap());
    assert_forked(pool.rebuild_index());
    assert!(pool.space().read_source(leased[0], 0).is_none());
    assert!(pool.space().write_target(leased[0], 0).is_none());
    assert!(!pool.space().mark_part(leased[0], 0, None));
    drop(Arc::clone(pool));
}

fn assert_own_member(dir: &Path, inherited: &Arc<Pool>, chain: &[Key]) {
    let pool = open(dir);
    assert!(!Arc::ptr_eq(inherited, &pool));
    let ns = namespace(&pool, MAIN);
    assert_eq!(check_chain(&pool, ns, chain), 4);
    assert_eq!(store_chain(&pool, ns, &keys(100..104), 1), 4);
    assert_eq!(pool.member().unwrap().row, 1);
    drop(pool);
}

/// The parent has reserved something and is killed; its child lives on with all it inherited.
fn outlive(pool: &Pool, ns: Namespace) {
    assert_eq!(pool.reserve(ns, &keys(50..51), None, true).unwrap().len(), 1);
    // SAFETY: as above.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            say("forked");
            wait_for_parent();
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        ForkResult::Parent { child } => {
            let _killed_first = waitpid(child, None);
        }
    }
}

/// Fork again and again while another thread stores.
fn fork_while_busy(dir: &Path, pool: &Arc<Pool>, ns: Namespace) {
    let busy = Arc::clone(pool);
    let storing = std::thread::spawn(move || {
        for number in 1000..1600 {
            store_chain(&busy, ns, &keys(number..number + 2), number);
        }
    });
    for _ in 0..30 {
        in_child(|| assert_forked(pool.reap()));
    }
    storing.join().unwrap();
    in_child(|| assert_own_member(dir, pool, &keys(0..4)));
}
