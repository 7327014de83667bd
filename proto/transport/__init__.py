"""The only place with sockets: one bind function, one connect function, explicit limits on both."""
