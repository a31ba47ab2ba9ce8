"""The command line: one module for each command, and modules for their settings and output. May import every
package."""
