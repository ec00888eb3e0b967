//! A pool mapped for looking: no row of the process table, nothing changed.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use crate::shm::control::Control;
use crate::shm::extent::Extent;
use crate::shm::file::Place;
use crate::shm::home::Home;
use crate::shm::liveness::held_by_other;
use crate::shm::names::{CONTROL, parse_pool_dir};
use crate::shm::process::{Member, ProcessState, load};
use crate::shm::segments_dir;
use crate::shm::superblock::Superblock;

/// One pool, mapped.
pub(crate) struct View {
    pub(crate) name: String,
    pub(crate) dir: PathBuf,
    pub(crate) home: Home,
    pub(crate) file: File,
    pub(crate) superblock: Superblock,
    pub(crate) control: Control,
}

/// What the process table says of one row in use.
pub(crate) struct ProcessView {
    pub(crate) member: Member,
    pub(crate) alive: bool,
}

impl View {
    /// Map the pool in directory `dir`.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        let place = Place::directory(dir)?;
        let name = pool_name(dir)?;
        let file = place.open(CONTROL).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(
                ErrorKind::NotFound,
                format!(
                    "the pool at {} is not complete: if its creator died, `pegaflow gc` clears it away after a minute",
                    dir.display()
                ),
            ),
            _ => error,
        })?;
        let superblock = Superblock::read(&file, dir)?;
        let control = Control::map(&file, superblock.geometry)?;
        let home = segments_dir::open(&place, &file, &superblock)?;
        Ok(Self { name, dir: dir.to_owned(), home, file, superblock, control })
    }

    /// Rows in use, living or dead.
    pub(crate) fn processes(&self) -> Vec<ProcessView> {
        let rows = self.control.processes().iter().enumerate();
        rows.filter_map(|(index, row)| {
            let (epoch, state) = load(row);
            let member = Member { row: index as u32, epoch };
            let alive = state.may_live() && held_by_other(&self.file, member.row);
            (state != ProcessState::Free).then_some(ProcessView { member, alive })
        })
        .collect()
    }

    /// Extents in use, and what is wrong with rows that cannot be read.
    pub(crate) fn extents(&self) -> (Vec<Extent>, Vec<String>) {
        let (mut extents, mut problems) = (Vec::new(), Vec::new());
        for index in 0..self.control.extents().len() as u32 {
            match Extent::load(&self.control, index) {
                Ok(extent) => extents.extend(extent),
                Err(error) => problems.push(error.to_string()),
            }
        }
        (extents, problems)
    }
}

/// Name of the pool whose directory is `dir`.
pub(crate) fn pool_name(dir: &Path) -> Result<String> {
    let parsed = dir.file_name().and_then(|name| name.to_str()).and_then(parse_pool_dir);
    parsed.map(|parsed| parsed.name).ok_or_else(|| {
        Error::refused(format!("{} is not named like a pool's directory: give a pool's name or path", dir.display()))
    })
}
