"""What tests of rbtool and of its plug-ins share."""
