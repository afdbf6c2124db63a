//! Object stores behind the KV cache folder: S3, Google Cloud Storage, Azure, WebDAV and HTTP, through `opendal`.
//!
//! [`open`] makes a [`RemoteStore`](lacuna_kv::folder::remote::RemoteStore) of an address; the folder does the rest.
//! Nothing here knows what objects hold.
#![forbid(unsafe_code)]
#![cfg(feature = "services")]

mod address;
mod store;

pub use address::{AddressError, open, open_with};
