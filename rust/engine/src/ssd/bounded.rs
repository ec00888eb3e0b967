//! Calls into the kernel that may never come back, made by threads that may wait for them.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Paths that a thread of this process is at, and whether it was given up. What hangs is not tried again, so there
/// never are more such threads than paths.
static ENTERED: LazyLock<Mutex<HashMap<PathBuf, bool>>> = LazyLock::new(Mutex::default);

fn entered() -> MutexGuard<'static, HashMap<PathBuf, bool>> {
    ENTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A path that a thread is at.
struct Entry(PathBuf);

impl Entry {
    fn new(path: &Path) -> io::Result<Self> {
        match entered().get(path) {
            None => {}
            Some(true) => return Err(silent()),
            Some(false) => return Err(io::ErrorKind::ResourceBusy.into()),
        }
        entered().insert(path.to_owned(), false);
        Ok(Self(path.to_owned()))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        entered().remove(&self.0);
    }
}

fn silent() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it does not answer")
}

/// Have a thread of its own do `work`, and wait for it no longer than `limit`. What comes later is dropped there.
pub(super) fn within<R: Send + 'static>(limit: Duration, work: impl FnOnce() -> R + Send + 'static) -> io::Result<R> {
    start(work)?.recv_timeout(limit).map_err(|_| silent())
}

/// Do `work` for every path, side by side, none for longer than `limit`. A path that did not answer the last time fails
/// at once; [`io::ErrorKind::ResourceBusy`]: another thread of this process is at it right now.
pub(super) fn for_each<R: Send + 'static>(
    paths: &[PathBuf],
    limit: Duration,
    work: impl Fn(&Path) -> R + Send + Sync + 'static,
) -> Vec<io::Result<R>> {
    let work = Arc::new(work);
    let begin = |path: &PathBuf| {
        let (work, entry) = (Arc::clone(&work), Entry::new(path)?);
        start(move || {
            let result = work(&entry.0);
            // Before anybody hears of it, and may begin anew.
            drop(entry);
            result
        })
    };
    let begun: Vec<_> = paths.iter().map(begin).collect();
    let deadline = Instant::now() + limit;
    let answer = |(path, begun): (&PathBuf, io::Result<Receiver<R>>)| {
        begun?.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(|_| {
            entered().entry(path.clone()).and_modify(|given_up| *given_up = true);
            silent()
        })
    };
    paths.iter().zip(begun).map(answer).collect()
}

fn start<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> io::Result<Receiver<R>> {
    let (sender, answer) = channel();
    std::thread::Builder::new().name("pega-ssd-open".into()).spawn(move || {
        // Whoever asked may have gone: the result, with its locks, is dropped then.
        let _unheard = sender.send(work());
    })?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind::{ResourceBusy, TimedOut};

    const LONG: Duration = Duration::from_secs(600);

    /// Tells of its end.
    struct Late(std::sync::mpsc::Sender<()>);

    impl Drop for Late {
        fn drop(&mut self) {
            let _test_ended = self.0.send(());
        }
    }

    fn kinds<R>(results: &[io::Result<R>]) -> Vec<Option<io::ErrorKind>> {
        results.iter().map(|result| result.as_ref().err().map(io::Error::kind)).collect()
    }

    #[test]
    fn who_never_answers_keeps_nobody_and_is_not_asked_again_until_it_has() {
        let paths: Vec<PathBuf> = ["bounded-a", "bounded-hangs", "bounded-b"].map(PathBuf::from).into();
        let (end, ended) = channel::<()>();
        let ended = Mutex::new(ended);
        let (dropped, seen) = channel();
        let found = for_each(&paths[1..2], Duration::from_millis(1), move |_| {
            let _until_the_end = ended.lock().unwrap().recv();
            Late(dropped.clone())
        });
        assert_eq!(kinds(&found), [Some(TimedOut)]);
        assert_eq!(kinds(&for_each(&paths, LONG, |_| ())), [None, Some(TimedOut), None], "without waiting for it");
        end.send(()).unwrap();
        // What came too late is dropped where it came, and may be asked again.
        seen.recv().unwrap();
        assert_eq!(kinds(&for_each(&paths, LONG, |_| ())), [None; 3]);
    }

    #[test]
    fn who_comes_second_is_told_that_another_is_at_it() {
        let path = [PathBuf::from("bounded-twice")];
        let second = path.clone();
        let found = for_each(&path, LONG, move |_| kinds(&for_each(&second, LONG, |_| ())));
        assert_eq!(found[0].as_ref().unwrap(), &[Some(ResourceBusy)]);
    }
}
