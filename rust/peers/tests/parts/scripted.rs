//! A server of streams that does what a test says, byte by byte.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;

use pegaflow_engine::checksum::part_checksum;

use super::pools::pattern;
use super::rig::HOST;

/// Takes streams one after the other and hands each to `script` until the listener is gone.
pub struct Scripted {
    pub address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Scripted {
    pub fn new(streams: usize, mut script: impl FnMut(TcpStream) + Send + 'static) -> Self {
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let thread = std::thread::spawn(move || {
            for _ in 0..streams {
                script(listener.accept().unwrap().0);
            }
        });
        Self { address, thread: Some(thread) }
    }

    /// Wait until the script is over.
    pub fn join(&mut self) {
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// Read the client's greeting and one request; the parts that it asks for.
pub fn request(stream: &mut TcpStream, greeting: bool) -> Vec<(u32, u32)> {
    if greeting {
        let mut hello = [0; 16];
        stream.read_exact(&mut hello).unwrap();
        assert_eq!(&hello[..8], b"PEGADATA");
    }
    let mut head = [0; 32];
    stream.read_exact(&mut head).unwrap();
    let count = u32::from_le_bytes(head[24..28].try_into().unwrap()) as usize;
    let mut body = vec![0; count * 8];
    stream.read_exact(&mut body).unwrap();
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    body.chunks_exact(8).map(|part| (number(&part[..4]), number(&part[4..]))).collect()
}

/// The answer that a good server gives for `parts`.
pub fn answer(parts: &[(u32, u32)], sizes: &[u64]) -> Vec<u8> {
    let mut all = Vec::new();
    for &(index, part) in parts {
        let bytes = pattern(index.into(), part, sizes[part as usize] as usize);
        all.extend_from_slice(&index.to_le_bytes());
        all.extend_from_slice(&part.to_le_bytes());
        all.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        all.extend_from_slice(&bytes);
        all.extend_from_slice(&part_checksum(part, &bytes).to_le_bytes());
    }
    all
}

/// Write what the other side still takes.
pub fn write(stream: &mut TcpStream, bytes: &[u8]) {
    let _the_client_may_have_gone = stream.write_all(bytes);
}
