//! Object stores behind the KV cache folder: S3, Google Cloud Storage, Azure, WebDAV and HTTP, through `opendal`.
//!
//! `open` makes a `RemoteStore` of `lacuna-kv` of an address; the folder does the rest. Without the feature `services` the
//! crate is empty.
//! Nothing here knows what objects hold.
#![forbid(unsafe_code)]
#![cfg(feature = "services")]

mod address;
mod store;

pub use address::{AddressError, open, open_with};
