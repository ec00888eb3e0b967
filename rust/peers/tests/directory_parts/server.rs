//! `redis-server` in a directory of its own, killed with the value.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::{Connection, RedisResult, Value};

pub struct Server {
    pub port: u16,
    dir: PathBuf,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl Server {
    /// Start one with more arguments.
    pub fn start(arguments: &[&str]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let dir = std::env::temp_dir().join(format!("pega-directory-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let arguments = arguments.iter().map(ToString::to_string).collect();
        let mut server = Self { port, dir, arguments, child: None };
        server.restart();
        server
    }

    /// Kill it and start it again, without what it held.
    pub fn restart(&mut self) {
        self.kill();
        let mut command = Command::new("redis-server");
        if self.arguments.first().is_some_and(|argument| argument == "--sentinel") {
            let config = self.dir.join("sentinel.conf");
            std::fs::write(&config, "").unwrap();
            command.arg(config).arg("--sentinel");
        } else {
            command.args(["--save", "", "--appendonly", "no"]).args(&self.arguments);
        }
        command.args(["--bind", "127.0.0.1", "--port", &self.port.to_string()]).current_dir(&self.dir);
        let child = command.stdout(Stdio::null()).spawn().expect("the package redis-server is installed");
        self.child = Some(child);
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(began.elapsed() < Duration::from_secs(30), "redis-server does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// With kill -9.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }

    pub fn connect(&self) -> Connection {
        redis::Client::open(self.url()).unwrap().get_connection().unwrap()
    }

    /// Keys that begin like this.
    pub fn keys(&self, begin: &str) -> Vec<String> {
        redis::cmd("KEYS").arg(format!("{begin}*")).query(&mut self.connect()).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _best_effort = std::fs::remove_dir_all(&self.dir);
    }
}

/// One command, its words separated by spaces.
pub fn ask(connection: &mut Connection, words: &str) -> RedisResult<Value> {
    let mut words = words.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    for word in words {
        command.arg(word);
    }
    command.query(connection)
}
