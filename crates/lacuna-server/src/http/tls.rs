//! TLS: connections that nobody on the way can read, by a certificate and its key from files.
//!
//! A session makes records of plain bytes and plain bytes of records, over a stream that is never waited for here: what
//! cannot be read or written at once is an error of the kind `WouldBlock`, as with the stream itself.

use std::fs::File;
use std::io::{self, BufRead, ErrorKind, IoSlice, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection};
use tokio::net::TcpStream;

/// Bytes that wait to be sent at most: two records of the longest kind.
const MOST_WAITING: usize = 32 << 10;
/// More than any chain of certificates, and than any key.
const MOST_FILE_BYTES: u64 = 1 << 20;
/// The one protocol there is, for clients that ask during the handshake.
const HTTP_1_1: &[u8] = b"http/1.1";

/// What a server proves with who it is: certificates and their key, from files that may be replaced while it runs.
#[derive(Debug, Clone)]
pub struct Tls(Arc<Files>);

#[derive(Debug)]
struct Files {
    certificates: PathBuf,
    key: PathBuf,
    /// As they were when they were read last.
    current: RwLock<Arc<ServerConfig>>,
}

/// Certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read `{path}`: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// What is in a file is not what it should be.
    #[error(
        "`{path}` has no {wanted} in it; it should be PEM: lines between `-----BEGIN` and `-----END`"
    )]
    Missing {
        /// The file.
        path: PathBuf,
        /// What it should have.
        wanted: &'static str,
    },
    /// The certificate and the key do not go together, or are of a kind that is not known.
    #[error("`{certificates}` cannot be used with the key in `{key}`: {source}")]
    Unusable {
        /// The file of the certificates.
        certificates: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
}

impl Tls {
    /// Reads PEM files: certificates, the server's own first, and the key that belongs to it.
    ///
    /// # Errors
    /// [`TlsError`] says which file is wrong, and how.
    pub fn from_files(certificates: &Path, key: &Path) -> Result<Self, TlsError> {
        let current = RwLock::new(read(certificates, key)?);
        Ok(Self(Arc::new(Files {
            certificates: certificates.to_owned(),
            key: key.to_owned(),
            current,
        })))
    }

    /// Reads the files again, for connections that come from now on.
    ///
    /// # Errors
    /// [`TlsError`]; what was read before stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let config = read(&self.0.certificates, &self.0.key)?;
        *self
            .0
            .current
            .write()
            .unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// The server's end of a new connection.
    pub(super) fn session(&self) -> Result<Session, rustls::Error> {
        let current = self.0.current.read();
        let config = Arc::clone(&current.unwrap_or_else(PoisonError::into_inner));
        let mut connection = ServerConnection::new(config)?;
        connection.set_buffer_limit(Some(MOST_WAITING));
        Ok(Session(Mutex::new(connection)))
    }
}

fn read(certificates: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let missing = |path: &Path, wanted| TlsError::Missing {
        path: path.to_owned(),
        wanted,
    };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text(certificates)?).collect();
    let chain = chain.ok().filter(|chain| !chain.is_empty());
    let chain = chain.ok_or_else(|| missing(certificates, "certificate"))?;
    let private = PrivateKeyDer::from_pem_slice(&text(key)?);
    let private = private.map_err(|_| missing(key, "private key"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|config| {
            config
                .with_no_client_auth()
                .with_single_cert(chain, private)
        });
    let mut config = config.map_err(|source| TlsError::Unusable {
        certificates: certificates.to_owned(),
        key: key.to_owned(),
        source,
    })?;
    config.alpn_protocols = vec![HTTP_1_1.to_vec()];
    Ok(Arc::new(config))
}

fn text(path: &Path) -> Result<Vec<u8>, TlsError> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST_FILE_BYTES).read_to_end(&mut bytes));
    match read {
        Ok(_) => Ok(bytes),
        Err(source) => Err(TlsError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

/// The server's end of a connection. One task uses it, through shared references.
#[derive(Debug)]
pub(super) struct Session(Mutex<ServerConnection>);

/// What has come that nobody has read yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Come {
    Nothing,
    Bytes,
    /// The client sends no more.
    End,
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, ServerConnection> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Plain bytes that are here, none at the end; `None` when more has to be received first.
    pub(super) fn read(&self, buffer: &mut [u8]) -> Option<io::Result<usize>> {
        match self.lock().reader().read(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            // Without a farewell, which many leave out. HTTP says by itself whether something is missing.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Some(Ok(0)),
            read => Some(read),
        }
    }

    pub(super) fn come(&self) -> Come {
        match self.lock().reader().fill_buf() {
            Ok(bytes) if !bytes.is_empty() => Come::Bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => Come::Nothing,
            Ok(_) | Err(_) => Come::End,
        }
    }

    /// Receives what the stream has, once, and answers what the handshake wants answered. To be called when there is
    /// nothing to [`read`](Self::read), so that what has come is never more than what one call brings.
    pub(super) fn receive(&self, stream: &TcpStream) -> io::Result<()> {
        let mut connection = self.lock();
        connection.read_tls(&mut Records(stream))?;
        if let Err(error) = connection.process_new_packets() {
            // An alert tells the client.
            send(&mut connection, stream).ok();
            return Err(io::Error::new(ErrorKind::InvalidData, error));
        }
        unless_it_would_block(send(&mut connection, stream))
    }

    /// Takes plain bytes, as many as there is room for, and sends what goes at once.
    pub(super) fn try_write(
        &self,
        stream: &TcpStream,
        slices: &[IoSlice<'_>],
    ) -> io::Result<usize> {
        let mut connection = self.lock();
        send(&mut connection, stream)?;
        let written = connection.writer().write_vectored(slices)?;
        unless_it_would_block(send(&mut connection, stream))?;
        Ok(written)
    }

    /// Sends what was taken.
    pub(super) fn try_flush(&self, stream: &TcpStream) -> io::Result<()> {
        send(&mut self.lock(), stream)
    }

    /// Tells the client that nothing more comes, if that goes at once.
    pub(super) fn say_farewell(&self, stream: &TcpStream) {
        let mut connection = self.lock();
        connection.send_close_notify();
        send(&mut connection, stream).ok();
    }

    /// Whether both ends agree on keys, so that plain bytes can be sent.
    pub(super) fn is_ready(&self) -> bool {
        !self.lock().is_handshaking()
    }
}

fn send(connection: &mut ServerConnection, stream: &TcpStream) -> io::Result<()> {
    while connection.wants_write() {
        connection.write_tls(&mut Records(stream))?;
    }
    Ok(())
}

fn unless_it_would_block(sent: io::Result<()>) -> io::Result<()> {
    match sent {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
        sent => sent,
    }
}

/// The stream that records go over.
struct Records<'a>(&'a TcpStream);

impl Read for Records<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(buffer)
    }
}

impl Write for Records<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
