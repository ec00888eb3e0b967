//! One pool in a directory of its own, in which processes die one after the other.

use std::path::{Path, PathBuf};

use pegaflow_engine::tier::TierState;
use pegaflow_engine::{admin, names};

use crate::forge::Forge;
use crate::kill::blocks::{MAIN, POOL_NAME, namespace};
use crate::kill::settled::assert_nothing_lost;
use crate::kill::tier;

use super::survivor::Survivor;

/// Namespace of those who die at points of the SSD tier.
const TIER_SPACE: u8 = 77;

pub struct Home {
    pub dir: PathBuf,
    survivor: Option<Survivor>,
}

impl Home {
    /// An empty directory `name` below `parent`.
    pub fn new(parent: &Path, name: &str) -> Self {
        let dir = parent.join(name);
        std::fs::create_dir(&dir).unwrap();
        Self { dir, survivor: None }
    }

    /// Whether somebody of this process is there to see the next death.
    pub fn attend(&mut self, attend: bool) {
        if !attend {
            self.survivor.take().into_iter().for_each(Survivor::leave);
        } else if self.survivor.is_none() {
            self.survivor = Some(Survivor::new(&self.dir));
        }
    }

    /// Who was there, or comes now.
    pub fn survivor(&mut self) -> &Survivor {
        self.survivor.get_or_insert_with(|| Survivor::latecomer(&self.dir))
    }

    /// If somebody died at a point of the SSD tier: the next one serves, forgets, and nothing of the dead is left.
    pub fn check_tier(&mut self, points: &[&str]) {
        if !points.iter().any(|point| point.starts_with("ssd.")) {
            return;
        }
        let dir = self.dir.clone();
        let survivor = self.survivor();
        let ns = namespace(&survivor.pool, TIER_SPACE);
        tier::serve(&survivor.pool, &dir);
        survivor.pool.use_ssd(ns).unwrap();
        tier::until("serving", || tier::state(&survivor.pool) == TierState::Serving);
        survivor.pool.reset(ns).unwrap();
        survivor.assert_sound(false, points[0]);
    }

    /// All have left; who comes then finds no byte changed and no slot lost.
    pub fn finish(mut self) {
        self.attend(false);
        Forge::open(&self.dir).unwrap().end_grace_periods();
        let survivor = Survivor::latecomer(&self.dir);
        survivor.assert_sound(true, "all deaths");
        let ns = namespace(&survivor.pool, MAIN);
        assert_nothing_lost(&survivor.pool, &[ns]);
        drop(survivor);
        self.remove();
    }

    /// Remove the pool as its user would: nothing is left.
    pub fn remove(mut self) {
        self.survivor = None;
        let path = names::pool_dir(&self.dir, nix::unistd::geteuid().as_raw(), POOL_NAME);
        admin::remove(&path, false).unwrap();
        std::fs::remove_dir(&self.dir).expect("no file of the pool is left");
        let _none = std::fs::remove_dir_all(tier::ssd_dir(&self.dir));
    }
}
